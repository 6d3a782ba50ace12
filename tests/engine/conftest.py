"""A tiny random checkpoint that runs in a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.config import EngineConfig
from tests.models.tiny import tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Llama with a byte-level tokenizer; 128 tokens of context."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path) -> EngineConfig:
    """Runs the tiny checkpoint on one thread in little memory."""
    return EngineConfig(
        model=str(tiny_model), dtype="float32", num_threads=1, num_gpu_blocks_override=64, max_num_seqs=8
    )
