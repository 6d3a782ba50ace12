"""Responses kept in memory, for retrieval and for going on from them.

Owns the bounds: the oldest finished ones of the API key that holds most go first, running ones stay (their number is
bounded by the queue's limit). Nobody sees a response of another API key: to them it does not exist.
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


class _Shelf:
    """One caller's responses by id, the least recently used first."""

    __slots__ = ("entries", "size_bytes")

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size_bytes = 0

    def resize(self, entry: StoredResponse, size_bytes: int) -> int:
        """Note an entry's size; returns by how much it grew."""
        grown = size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes
        self.size_bytes += grown
        return grown

    def oldest_finished(self) -> str | None:
        """What goes first, if anything can."""
        return next((key for key, entry in self.entries.items() if entry.finished), None)


class ResponseStore:
    """By caller and id. Past a bound whoever holds most makes room: a busy caller pushes out nobody's but its own."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._shelves: dict[bytes, _Shelf] = {}
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, entry: StoredResponse) -> None:
        """Keep a response; others may have to go."""
        self._shelves.setdefault(entry.owner, _Shelf()).entries[entry.response["id"]] = entry
        self._count += 1
        self.note(entry)

    def note(self, entry: StoredResponse) -> None:
        """It has changed. One that was deleted meanwhile stays so."""
        shelf = self._shelves.get(entry.owner)
        if shelf is None or entry.response["id"] not in shelf.entries:
            return
        size_bytes = len(msgspec.json.encode([entry.response, entry.input_items, entry.history]))
        size_bytes += sum(map(len, entry.events or ()))
        self.size_bytes += shelf.resize(entry, size_bytes)
        self._evict()

    def get(self, response_id: str, owner: bytes) -> StoredResponse:
        """Raises NotFoundError, also for somebody else's."""
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(response_id)
        if shelf is None or entry is None:
            raise NotFoundError(
                f"there is no response {response_id[:100]!r}; it was never stored, was deleted, or made room for others"
            )
        shelf.entries.move_to_end(response_id)
        return entry

    def items_of(self, owner: bytes) -> dict[str, Item]:
        """The items of all stored responses of one caller, by id."""
        shelf = self._shelves.get(owner) or _Shelf()
        return {
            item["id"]: item
            for entry in shelf.entries.values()
            for item in (*entry.input_items, *entry.response["output"])
        }

    def delete(self, response_id: str, owner: bytes) -> None:
        """Forget it; it stops if it runs."""
        entry = self.get(response_id, owner)
        self._remove(response_id, owner)
        if entry.task is not None:
            entry.task.cancel()

    def _remove(self, response_id: str, owner: bytes) -> None:
        shelf = self._shelves[owner]
        entry = shelf.entries.pop(response_id)
        self.size_bytes += shelf.resize(entry, 0)
        self._count -= 1
        if not shelf.entries:
            del self._shelves[owner]

    def _evict(self) -> None:
        while self._count > self._max_count:
            if not self._make_room({owner: len(shelf.entries) for owner, shelf in self._shelves.items()}):
                break
        while self.size_bytes > self._max_bytes:
            if not self._make_room({owner: shelf.size_bytes for owner, shelf in self._shelves.items()}):
                break

    def _make_room(self, holdings: dict[bytes, int]) -> bool:
        """Drop one response, of the largest holder that can; nobody loses what is within an equal share."""
        share = sum(holdings.values()) / len(holdings)
        for owner in sorted(holdings, key=holdings.__getitem__, reverse=True):
            goes = self._shelves[owner].oldest_finished()
            if goes is not None and holdings[owner] >= share:
                self._remove(goes, owner)
                return True
        return False
