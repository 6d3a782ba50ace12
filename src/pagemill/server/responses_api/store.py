"""Responses kept in memory, for retrieval and for going on from them.

Owns the bounds: the oldest finished ones go first, running ones stay (their number is bounded by the queue's limit).
Nobody sees a response of another API key: to them it does not exist.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagemill.errors import NotFoundError
from pagemill.server.responses_api.items import Item

__all__ = ["ResponseStore", "StoredResponse"]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response, running or finished."""

    owner: bytes
    """Digest of the API key that asked for it."""
    response: dict[str, Any]
    input_items: list[Item]
    """What this request brought."""
    history: list[Item]
    """What came before: earlier responses' inputs and outputs."""
    task: asyncio.Task[None] | None = None
    """What produces it, in the background."""
    events: list[bytes] | None = None
    """Each as it is sent; kept for background streams alone."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change, then replaced."""
    size_bytes: int = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more comes."""
        return self.response["status"] not in ("queued", "in_progress")

    @property
    def conversation(self) -> list[Item]:
        """Everything up to the end of this response."""
        return [*self.history, *self.input_items, *self.response["output"]]

    def tell(self) -> None:
        """Wake who follows it."""
        self.changed.set()
        self.changed = asyncio.Event()


class ResponseStore:
    """By id, the least recently used first."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Keep a response; others may have to go."""
        self._entries[entry.response["id"]] = entry
        self.note(entry)

    def note(self, entry: StoredResponse) -> None:
        """It has changed. One that was deleted meanwhile stays so."""
        if entry.response["id"] not in self._entries:
            return
        self.size_bytes -= entry.size_bytes
        entry.size_bytes = len(msgspec.json.encode([entry.response, entry.input_items, entry.history]))
        entry.size_bytes += sum(map(len, entry.events or ()))
        self.size_bytes += entry.size_bytes
        self._evict()

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """Raises NotFoundError, also for somebody else's."""
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise NotFoundError(
                f"there is no response {response_id[:100]!r}; it was never stored, was deleted, or made room for others"
            )
        self._entries.move_to_end(response_id)
        return entry

    def items_of(self, owner: bytes) -> dict[str, Item]:
        """The items of all stored responses of one caller, by id."""
        return {
            item["id"]: item
            for entry in self._entries.values()
            if entry.owner == owner
            for item in (*entry.input_items, *entry.response["output"])
        }

    def delete(self, response_id: str, owner: bytes) -> None:
        """Forget it; it stops if it runs."""
        entry = self.get(response_id, owner)
        self._remove(response_id)
        if entry.task is not None:
            entry.task.cancel()

    def _remove(self, response_id: str) -> None:
        self.size_bytes -= self._entries.pop(response_id).size_bytes

    def _evict(self) -> None:
        if len(self._entries) <= self._max_count and self.size_bytes <= self._max_bytes:
            return
        for response_id in [key for key, entry in self._entries.items() if entry.finished]:
            self._remove(response_id)
            if len(self._entries) <= self._max_count and self.size_bytes <= self._max_bytes:
                return
