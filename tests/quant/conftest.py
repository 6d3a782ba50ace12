"""Tiny models are quickest on one thread."""

from tests.models.conftest import _one_thread

__all__ = ["_one_thread"]
