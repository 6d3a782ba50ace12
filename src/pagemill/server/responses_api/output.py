"""The items of one answer as they grow, and the events that tell of it.

Owns the order of events: an item is added, then its parts, then deltas, and each is done before the next begins. Fed
with the parsers' deltas; whole answers are built the same way, their events thrown away.
"""

from __future__ import annotations

from typing import Any

from pagemill.server.parsers.deltas import Arguments, CallStart, Delta, Reasoning
from pagemill.server.responses_api.items import Item, new_id

__all__ = ["Event", "OutputItems"]

Event = dict[str, Any]
KINDS: dict[str, tuple[str, str]] = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
    "function_call": ("", "response.function_call_arguments"),
}
"""Item -> type of its one part, and the name of its deltas."""


class OutputItems:
    """Items in order; the last one may be open."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._pieces: list[str] = []
        """Text or arguments of the open item."""
        self._open: Item | None = None
        self._logprobs: list[Item] = []
        """Of tokens whose text has not come yet."""

    @property
    def reasoning(self) -> str:
        """Everything that was thought."""
        return "".join(part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"])

    def add_logprobs(self, tokens: list[Item]) -> None:
        """They go with the message's next text."""
        self._logprobs += tokens

    def take(self, deltas: list[Delta]) -> list[Event]:
        """Events of some deltas."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, CallStart):
                events += self._begin("function_call", call_id=delta.id, name=delta.name, arguments="")
            elif isinstance(delta, Arguments):
                events.append(self._grown(delta.fragment))
            else:
                kind = "reasoning" if isinstance(delta, Reasoning) else "message"
                if self._open is None or self._open["type"] != kind:
                    events += self._begin(kind)
                events.append(self._grown(delta.text))
        return events

    def finish(self, status: str) -> list[Event]:
        """Close what is open; an answer that says nothing is an empty message."""
        events = [] if self.items else self._begin("message")
        if self._logprobs and self._open is not None and self._open["type"] == "message":
            self._open["content"][0]["logprobs"] += self._logprobs
            self._logprobs = []
        return events + self._end(status)

    def _begin(self, kind: str, **fields: str) -> list[Event]:
        events = self._end("completed")
        if kind == "message":
            item: Item = {
                "type": kind,
                "id": new_id("msg"),
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        elif kind == "reasoning":
            item = {"type": kind, "id": new_id("rs"), "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"type": kind, "id": new_id("fc"), "status": "in_progress", **fields}
        self._open = item
        self.items.append(item)
        events.append({"type": "response.output_item.added", "output_index": self._index, "item": _copy(item)})
        if kind != "function_call":
            item["content"].append(_part(kind))
            events.append({"type": "response.content_part.added", **self._place(), "part": _part(kind)})
        return events

    def _grown(self, text: str) -> Event:
        assert self._open is not None, "a delta belongs to an item"
        self._pieces.append(text)
        event = {"type": f"{KINDS[self._open['type']][1]}.delta", **self._place(), "delta": text}
        if self._open["type"] == "message":
            event["logprobs"] = self._logprobs
            self._open["content"][0]["logprobs"] += self._logprobs
            self._logprobs = []
        return event

    def _end(self, status: str) -> list[Event]:
        """Done: the text, the part, the item."""
        item = self._open
        if item is None:
            return []
        text, self._pieces = "".join(self._pieces), []
        item["status"] = status
        kind = item["type"]
        done: Event = {"type": f"{KINDS[kind][1]}.done", **self._place()}
        events = [done]
        if kind == "function_call":
            item["arguments"] = text
            done |= {"name": item["name"], "arguments": text}
        else:
            part = item["content"][0]
            part["text"] = text
            done["text"] = text
            if kind == "message":
                done["logprobs"] = part["logprobs"]
            events.append({"type": "response.content_part.done", **self._place(), "part": part})
        events.append({"type": "response.output_item.done", "output_index": self._index, "item": item})
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self) -> Event:
        item = self.items[-1]
        place: Event = {"item_id": item["id"], "output_index": self._index}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}


def _part(kind: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: Item) -> Item:
    """An item without its parts, as it begins."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
