"""Crowds of clients that vanish at random points leave nothing: no request, block, task, connection or descriptor."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill.bench.vanishing import POINTS, vanish
from pagemill.engine import grammar_compiler
from pagemill.engine.frontend import AsyncLLM
from pagemill.params import FinishReason
from tests.server.conftest import REQUEST_TIMEOUT_S, Served, serving
from tests.server.fake_engine import FakeEngine
from tests.server.test_lifecycle import eventually

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 200, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "b" * 300, "max_tokens": 200, "ignore_eos": True, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 100, "ignore_eos": True, "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "max_tokens": 50, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "b" * 300, "prompt_logprobs": 1, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HI, "stream": True, "max_tokens": 200, "stop": ["never there"]}),
    ("/v1/chat/completions", {"messages": HI, "n": 3, "max_tokens": 200, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": HI, "tools": [TOOL], "stream": True, "max_tokens": 50}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "long " * 3000}], "stream": True}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 3, "max_tokens": 50}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 200, "ignore_eos": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 200, "ignore_eos": True, "stream": True}),
    ("/tokenize", {"prompt": "long " * 3000}),
]
CONSTRAINED = (
    "/v1/chat/completions",
    {"messages": HI, "response_format": {"type": "json_object"}, "stream": True, "max_tokens": 50},
)


def descriptors() -> int:
    """Open in this process, without the pipes of the children that check grammars: they stay for the next one."""
    grammar_compiler._checkers.close()
    return len(os.listdir("/proc/self/fd"))


def tasks() -> set[str]:
    return {str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def crowd(served: Served, number: int, at_once: int, bodies: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """So many clients; returns the points where they went."""
    port = int(served.url.rsplit(":", 1)[1])
    chance = random.Random(11)
    seats = asyncio.Semaphore(at_once)

    async def one() -> str:
        async with seats:
            path, body = chance.choice(bodies)
            return await vanish(port, path, body, chance)

    return set(await asyncio.gather(*(one() for _ in range(number))))


async def leaves_nothing(served: Served, number: int, at_once: int, bodies: list[tuple[str, dict[str, Any]]]) -> None:
    """A crowd comes and goes; everything is as it was."""
    async with httpx.AsyncClient(base_url=served.url, timeout=REQUEST_TIMEOUT_S) as http:
        assert (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200
    connections = served.server.server_state.connections
    await eventually(lambda: not connections)
    before, open_before = tasks(), descriptors()
    assert await crowd(served, number, at_once, bodies) == set(POINTS)
    await eventually(lambda: not connections and not served.server.server_state.tasks)
    await eventually(lambda: served.app.context.admission.open == 0)
    await eventually(lambda: tasks() <= before)
    gc.collect()
    assert descriptors() <= open_before


async def test_three_hundred_clients_that_vanish_leave_nothing_in_the_server() -> None:
    async with serving(FakeEngine("x" * 400)) as served:
        await leaves_nothing(served, 300, 100, BODIES)
        assert not served.engine.running
        assert served.engine.aborted


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_thousand_clients_that_vanish_leave_nothing_in_server_and_engine(embedded: AsyncLLM) -> None:
    bodies = [*BODIES, CONSTRAINED]
    async with serving(embedded) as served:  # type: ignore[arg-type]
        pid = embedded.engine_pid
        assert pid is not None
        await leaves_nothing(served, 200, 50, bodies)
        files, before = len(os.listdir(f"/proc/{pid}/fd")), resident_bytes(os.getpid())
        await leaves_nothing(served, 1000, 100, bodies)
        await eventually(lambda: embedded.metrics.num_open == 0)
        assert embedded._output.num_queued_tokens == 0
        assert not embedded._output.requests
        assert await embedded.call("check_invariants") is None
        stats = await embedded.call("stats")
        running, waiting, usage, held = stats[4], stats[5], stats[6], stats[12]
        assert (running, waiting, usage, held) == (0, 0, 0.0, 0)
        assert embedded.metrics.finished(FinishReason.ABORT) > 300
        assert embedded.metrics.finished(FinishReason.ERROR) == 0
        assert embedded.engine_pid == pid
        assert len(os.listdir(f"/proc/{pid}/fd")) <= files
        assert resident_bytes(os.getpid()) < before + 64 * 1024 * 1024
