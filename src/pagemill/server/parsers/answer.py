"""One completion's text, read whole: first what the model thought, then what it says and calls.

Owns how deltas are written in OpenAI's messages, whole and streamed.
"""

from __future__ import annotations

from typing import Any

from pagemill.server.parsers.deltas import Arguments, CallStart, Delta, Parser, Reasoning, Text
from pagemill.server.parsers.reasoning import ReasoningParser

__all__ = ["AnswerParser", "Message", "delta_fields"]


class AnswerParser:
    """The parsers of one choice, one behind the other."""

    def __init__(self, reasoning: ReasoningParser | None, calls: Parser | None, *, parallel: bool) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self.called = False
        """Whether a call has been read."""

    def feed(self, text: str) -> list[Delta]:
        """What the next piece settles."""
        return self._through([Text(text)] if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> list[Delta]:
        """What was held back."""
        out = [] if self._reasoning is None else self._through(self._reasoning.finish())
        return out + (self._kept(self._calls.finish()) if self._calls is not None else [])

    def _through(self, deltas: list[Delta]) -> list[Delta]:
        if self._calls is None:
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            out += self._kept(self._calls.feed(delta.text)) if isinstance(delta, Text) else [delta]
        return out

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        """Without the calls after the first where only one may be."""
        self.called = self.called or any(isinstance(delta, CallStart) for delta in deltas)
        if self._parallel:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, CallStart | Arguments) or delta.index == 0]


class Message:
    """A whole answer, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, deltas: list[Delta]) -> None:
        """Take in what a parser gave."""
        for delta in deltas:
            if isinstance(delta, Text):
                self._content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self._reasoning.append(delta.text)
            elif isinstance(delta, CallStart):
                self._calls.append((delta, []))
            else:
                self._calls[delta.index][1].append(delta.fragment)

    def as_dict(self, role: str, echoed: str, *, include_reasoning: bool) -> dict[str, Any]:
        """OpenAI's message; no content beside calls or reasoning is null."""
        content = echoed + "".join(self._content)
        nothing = not content and bool(self._calls or self._reasoning)
        message: dict[str, Any] = {"role": role, "content": None if nothing else content, "refusal": None}
        if self._reasoning and include_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": start.id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": "".join(fragments)},
                }
                for start, fragments in self._calls
            ]
        return message


def delta_fields(delta: Delta, *, include_reasoning: bool) -> dict[str, Any]:
    """A delta as a stream's event says it; empty where it says nothing."""
    if isinstance(delta, Text):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text, "reasoning": delta.text} if include_reasoning else {}
    if isinstance(delta, CallStart):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.fragment}}]}
