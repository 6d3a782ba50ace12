"""Stored responses stay within their bounds, and with the key that made them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from pagemill.errors import NotFoundError
from pagemill.server.responses_api.store import ResponseStore, StoredResponse


def entry(name: str, *, status: str = "completed", text: str = "", owner: bytes = b"me") -> StoredResponse:
    response: dict[str, Any] = {"id": name, "status": status, "output": []}
    return StoredResponse(owner, response, [{"id": f"{name}-item", "text": text}], [])


def held(store: ResponseStore, *names: str) -> list[str]:
    found = []
    for name in names:
        with contextlib.suppress(NotFoundError):
            found.append(store.get(name, b"me").response["id"])
    return found


def test_the_least_recently_used_finished_response_makes_room() -> None:
    store = ResponseStore(max_count=2, max_bytes=10_000)
    store.put(entry("a"))
    store.put(entry("b"))
    store.get("a", b"me")
    store.put(entry("c"))
    assert held(store, "a", "b", "c") == ["a", "c"]


def test_running_responses_stay_until_they_are_finished() -> None:
    store = ResponseStore(max_count=1, max_bytes=10_000)
    running = entry("a", status="in_progress")
    store.put(running)
    store.put(entry("b"))
    assert held(store, "a", "b") == ["a"]
    running.response["status"] = "completed"
    store.note(running)
    store.put(entry("c"))
    assert held(store, "a", "c") == ["c"]


def test_bytes_are_bounded_and_counted_back() -> None:
    store = ResponseStore(max_count=100, max_bytes=1000)
    for index in range(20):
        store.put(entry(str(index), text="x" * 300))
        assert store.size_bytes <= 1000
    assert 0 < len(store) < 4
    store.put(entry("big", text="x" * 2000))
    assert (len(store), store.size_bytes) == (0, 0)
    store.put(entry("a"))
    store.delete("a", b"me")
    assert (len(store), store.size_bytes) == (0, 0)


def test_one_that_was_deleted_while_it_ran_stays_deleted() -> None:
    store = ResponseStore(max_count=2, max_bytes=1000)
    running = entry("a", status="in_progress")
    store.put(running)
    store.delete("a", b"me")
    store.note(running)
    assert len(store) == 0


def test_another_key_sees_nothing() -> None:
    store = ResponseStore(max_count=2, max_bytes=1000)
    store.put(entry("a", owner=b"other"))
    with pytest.raises(NotFoundError, match="'a'"):
        store.get("a", b"me")
    with pytest.raises(NotFoundError):
        store.delete("a", b"me")
    assert store.items_of(b"me") == {}
    assert store.items_of(b"other").keys() == {"a-item"}


def test_a_busy_key_pushes_out_its_own_alone() -> None:
    store = ResponseStore(max_count=10, max_bytes=100_000)
    for index in range(4):
        store.put(entry(f"quiet-{index}"))
    for index in range(50):
        store.put(entry(f"busy-{index}", owner=b"busy"))
    assert held(store, *(f"quiet-{index}" for index in range(4))) == [f"quiet-{index}" for index in range(4)]
    assert len(store) == 10
    assert store.get("busy-49", b"busy")


def test_a_key_with_large_responses_pushes_out_its_own_alone() -> None:
    store = ResponseStore(max_count=100, max_bytes=3000)
    store.put(entry("quiet", text="x" * 500))
    for index in range(20):
        store.put(entry(f"busy-{index}", text="x" * 400, owner=b"busy"))
    assert held(store, "quiet") == ["quiet"]
    assert store.size_bytes <= 3000


def test_running_responses_of_a_busy_key_cost_nobody_a_finished_one() -> None:
    store = ResponseStore(max_count=4, max_bytes=10_000)
    store.put(entry("quiet"))
    for index in range(8):
        store.put(entry(f"busy-{index}", status="in_progress", owner=b"busy"))
    assert held(store, "quiet") == ["quiet"]


def test_room_is_made_among_keys_that_hold_the_same() -> None:
    store = ResponseStore(max_count=3, max_bytes=10_000)
    for owner in (b"me", b"a", b"b", b"c"):
        store.put(entry("x", owner=owner))
    assert len(store) == 3
