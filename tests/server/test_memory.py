"""Large requests leave no memory behind: it is given back once they have ended."""

from __future__ import annotations

import asyncio

import pytest

from pagemill.server import memory
from tests.server.conftest import Served


async def test_memory_is_given_back_after_large_requests_and_not_after_small_ones(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PAUSE_S", 0.05)
    loop, asked, given_back = asyncio.get_running_loop(), [], asyncio.Event()

    def trim(kept: int) -> int:
        asked.append(len(served.engine.seen))
        loop.call_soon_threadsafe(given_back.set)
        return 1

    served.app.context.memory._trim = trim
    await served.http.post("/v1/completions", json={"prompt": "a"})
    for _ in range(3):
        await served.http.post("/v1/completions", json={"prompt": [7] * 200_000, "max_tokens": 1})
    async with asyncio.timeout(60):
        await given_back.wait()
    assert asked
    assert 1 not in asked


def test_the_c_library_is_asked_where_it_can_be() -> None:
    trim = memory._malloc_trim()
    assert trim is None or trim(0) in {0, 1}
