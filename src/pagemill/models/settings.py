"""Typed reading of a checkpoint's configuration, with errors that name the key.

Owns the checks on types and signs. Must not know families or formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagemill.errors import ModelFormatError

__all__ = ["MAX_LAYERS", "MAX_SIZE", "Settings"]

MAX_SIZE = 1 << 31
"""No size, count or position in a model reaches this; larger ones are damage."""
MAX_NUMBER = 3.4e38
"""Models compute in float32, which ends there."""
MAX_LAYERS = 4096
"""Layers of the deepest model that is read."""


class Settings:
    """A mapping with the place it came from. A key that holds null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key holds anything."""
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None, *, most: int = MAX_SIZE - 1) -> int:
        """A whole number from 1 to ``most``."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ModelFormatError(f"{self.where}: {key}={_shown(value)} must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number that float32 can hold."""
        value = self._get(key, default)
        if isinstance(value, bool) or not _is_number(value):
            raise ModelFormatError(f"{self.where}: {key}={_shown(value)} must be a number of at most {MAX_NUMBER:g}")
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """A number, or None where there is none."""
        return self.number(key) if self.has(key) else None

    def positive(self, key: str, default: float | None = None) -> float:
        """A number > 0."""
        value = self.number(key, default)
        if value <= 0:
            raise ModelFormatError(f"{self.where}: {key}={_shown(value)} must be greater than 0")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.where}: {key}={_shown(value)} must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFormatError(f"{self.where}: {key}={_shown(value)} must be a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers, or None."""
        values = self.values.get(key)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or not all(map(_is_number, values)):
            raise ModelFormatError(f"{self.where}: {key} must be a list of numbers of at most {MAX_NUMBER:g}")
        return tuple(float(value) for value in values)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFormatError(f"{self.where} does not say {key!r}; the checkpoint is incomplete")
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_NUMBER


def _shown(value: Any) -> str:
    """A value, cut. Python refuses to write integers of more than a few thousand digits."""
    try:
        text = repr(value)
    except ValueError:
        text = type(value).__name__
    return text if len(text) <= 80 else text[:80] + "..."
