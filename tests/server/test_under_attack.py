"""While the server is attacked from all sides nobody else loses an answer, and afterwards everything is as it was."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from pagemill.bench.vanishing import vanish
from pagemill.engine.frontend import AsyncLLM
from tests.server.conftest import REQUEST_TIMEOUT_S, Served, serving
from tests.server.test_lifecycle import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ATTACKS: list[tuple[str, Any]] = [
    (COMPLETIONS, {"prompt": [10**6] * 2000}),
    (COMPLETIONS, {"prompt": [5, -1, 10**9]}),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot", "n": -1}),
    (COMPLETIONS, {"prompt": "a", "model": "no such model"}),
    (COMPLETIONS, {"prompt": ["a"] * 3000}),
    (COMPLETIONS, {"prompt": "seven " * 600_000}),
    (COMPLETIONS, {"prompt": "7" * 100_000}),
    (COMPLETIONS, {"prompt": [5] * 262_144}),
    (CHAT, {"messages": [{"role": 5}] * 1000}),
    (CHAT, {"messages": [{"role": "user", "content": "much to read " * 70}] * 4000}),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_none"}),
    ("/v1/responses/resp_none/cancel", None),
    ("/no/such/path", {}),
    ("/tokenize", {"prompt": "seven " * 600_000}),
    ("/tokenize", {"prompt": "7" * 400_000}),
    ("/detokenize", {"tokens": [5000] * 262_144}),
]
WRITTEN = [(path, json.dumps(body).encode()) for path, body in ATTACKS]


async def answer(http: httpx.AsyncClient, number: int) -> str:
    body = {"prompt": f"Client {number} asks:", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answered = await http.post(COMPLETIONS, json=body)
    assert answered.status_code == 200, answered.text
    return str(answered.json()["choices"][0]["text"])


async def flood(http: httpx.AsyncClient, number: int, over: asyncio.Event) -> Counter[int]:
    """One attack after another; each at least once between the clients of this kind."""
    chance, statuses = random.Random(number), Counter[int]()
    for path, body in WRITTEN[number::4]:
        statuses[(await http.post(path, content=body)).status_code] += 1
    while not over.is_set():
        path, body = chance.choice(WRITTEN)
        statuses[(await http.post(path, content=body)).status_code] += 1
    return statuses


async def crowd(served: Served, number: int, over: asyncio.Event) -> Counter[int]:
    """One client after another that vanishes."""
    chance, port = random.Random(number), int(served.url.rsplit(":", 1)[1])
    while not over.is_set():
        body = {"prompt": f"Vanishing {chance.random()}", "max_tokens": 50, "ignore_eos": True, "stream": True}
        await vanish(port, COMPLETIONS, body, chance, longest_s=0.2)
    return Counter()


async def probe(http: httpx.AsyncClient, over: asyncio.Event) -> Counter[int]:
    """Is the server well?"""
    statuses = Counter[int]()
    while not over.is_set():
        statuses[(await http.get("/health")).status_code] += 1
        await asyncio.sleep(0.02)
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_request_is_lost_while_the_server_is_attacked(embedded: AsyncLLM) -> None:
    limits, over = httpx.Limits(max_connections=None), asyncio.Event()
    async with (
        serving(embedded) as served,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=served.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as http,
    ):
        wanted = [await answer(http, number) for number in range(8)]
        jobs = [flood(http, number, over) for number in range(4)] + [crowd(served, number, over) for number in range(8)]
        attacks = [asyncio.create_task(job) for job in [*jobs, probe(http, over)]]
        try:
            for _ in range(3):
                assert await asyncio.gather(*(answer(http, number) for number in range(8))) == wanted
        finally:
            over.set()
            *answered, probed = await asyncio.gather(*attacks)
        assert set(probed) == {200}
        assert set(sum(answered, Counter())) == {200, 400, 404, 413}, answered
        await eventually(lambda: embedded.metrics.num_open == served.app.context.admission.open == 0)
        assert embedded._output.num_queued_tokens == 0
        assert await embedded.call("check_invariants") is None
        assert [await answer(http, number) for number in range(8)] == wanted
