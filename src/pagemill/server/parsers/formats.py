"""How a format of tool calls differs from the next: the few facts that calls.py reads by."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ToolFormat"]


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Calls are JSON objects ``{"name": ..., "arguments": {...}}`` ("parameters" will do), alone or in a list."""

    openers: tuple[str, ...] = ()
    """Markers that calls follow."""
    closer: str = ""
    """Marker after the calls, swallowed."""
    bare: bool = False
    """An output that begins with JSON may be a call without a marker, if it names a tool of the request."""
    separator: str = ""
    """A character between calls outside a list."""
    leading_name: bool = False
    """The name may stand before the object, which is then the arguments alone."""
    tag: tuple[str, str, str] | None = None
    """What a call begins with, what stands between its name and its arguments, and after them; None where no grammar
    can follow a call in free text. The first opener triggers it."""
    special: bool = False
    """Markers are special tokens, which must reach the text."""
    hints: tuple[str, ...] = ()
    """What in a chat template tells that its model writes this format."""
    new_id: Callable[[], str] = _call_id
    """Ids as the model's template takes them."""
