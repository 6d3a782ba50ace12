"""What parsers give: pieces of an answer, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Arguments", "CallStart", "Delta", "Parser", "Reasoning", "Text"]


@dataclass(frozen=True, slots=True)
class Text:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; said once, before any of its arguments."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments; the fragments of a call make one JSON object."""

    index: int
    fragment: str


Delta = Text | Reasoning | CallStart | Arguments


class Parser(Protocol):
    """Reads one completion. However its text is cut into pieces, the deltas add up to the same."""

    def feed(self, text: str) -> list[Delta]:
        """What the next piece settles."""

    def finish(self) -> list[Delta]:
        """What was held back; nothing follows."""
