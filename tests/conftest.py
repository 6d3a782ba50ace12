"""What tests of several rooms share: the embedded models, fetched once by the product's own code."""

from __future__ import annotations

import pytest

from pagemill.config import DEFAULT_MODEL
from pagemill.models.sources import ModelSource, resolve_source


@pytest.fixture(scope="session")
def embedded_source() -> ModelSource:
    """SmolLM2-135M-Instruct in the user's cache folder."""
    return resolve_source(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def minilm_source() -> ModelSource:
    """all-MiniLM-L6-v2 in the user's cache folder."""
    return resolve_source("all-minilm-l6-v2")
