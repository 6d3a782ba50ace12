"""Clients that vanish, queues that are full, an engine that is down, a server that drains."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pagemill.config import ServerConfig
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"


async def eventually(condition: Any) -> None:
    """Wait until ``condition()`` holds; the test's own timeout ends it otherwise."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (conditions of the server have no event to wait on)
            await asyncio.sleep(0)


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": "a", "stream": True}])
async def test_a_client_that_vanishes_while_waiting_aborts(served: Served, body: dict[str, Any]) -> None:
    served.engine.gate.clear()
    task = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
    await eventually(lambda: served.engine.running)
    started = len(served.engine.running)
    task.cancel()
    await eventually(lambda: not served.engine.running)
    assert len(served.engine.aborted) == started
    await eventually(lambda: served.app.context.admission.open == 0)


async def test_a_client_that_vanishes_in_a_stream_aborts() -> None:
    async with serving(FakeEngine("x" * 400)) as served:
        body = {"prompt": "a", "stream": True, "max_tokens": None}
        async with served.http.stream("POST", COMPLETIONS, json=body) as answer:
            async for line in answer.aiter_lines():
                if line:
                    served.engine.gate.clear()
                    break
            assert served.engine.running
        await eventually(lambda: not served.engine.running)
        assert served.engine.aborted
        await eventually(lambda: served.app.context.admission.open == 0)


async def test_a_slow_reader_does_not_hold_up_others() -> None:
    async with serving(FakeEngine("x" * 400)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": None}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        for _ in range(5):
            assert (await served.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
        assert b"200 OK" in await reader.readline()
        writer.close()


@pytest.fixture
async def small() -> AsyncIterator[Served]:
    async with serving(FakeEngine(), ServerConfig(max_num_queued_reqs=2)) as served:
        yield served


async def test_a_full_queue_is_429_with_retry_after(small: Served) -> None:
    small.engine.gate.clear()
    tasks = [asyncio.create_task(small.http.post(COMPLETIONS, json={"prompt": "a"})) for _ in range(2)]
    await eventually(lambda: len(small.engine.running) == 2)
    answer = await small.http.post(COMPLETIONS, json={"prompt": "a"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "2" in answer.json()["error"]["message"]
    small.engine.gate.set()
    assert [task.status_code for task in await asyncio.gather(*tasks)] == [200, 200]
    assert (await small.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_a_refusal_says_when_to_come_back_by_the_measured_rate_and_is_counted(small: Served) -> None:
    metrics = small.engine.metrics
    for tick in range(50):  # completions end every 4 s
        metrics._ends.add(time.monotonic() - 4 * (49 - tick), 1)
    small.engine.gate.clear()
    task = asyncio.create_task(small.http.post(COMPLETIONS, json={"prompt": "a", "n": 2}))
    await eventually(lambda: small.engine.running)
    answer = await small.http.post(COMPLETIONS, json={"prompt": "a", "n": 2})
    assert answer.status_code == 429
    assert 7 <= int(answer.headers["retry-after"]) <= 9
    assert metrics.rejections["max_num_queued_reqs"] == 1
    small.engine.gate.set()
    assert (await task).status_code == 200


async def test_n_counts_n(small: Served) -> None:
    answer = await small.http.post(COMPLETIONS, json={"prompt": "a", "n": 3})
    assert answer.status_code == 400
    assert "--max-num-queued-reqs" in answer.json()["error"]["message"]


async def test_health_is_503_with_the_reason_while_the_engine_is_down(served: Served) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert (await served.http.get(path)).status_code == 200
    served.engine.state.alive = False
    served.engine.state.reason = "the engine process ended (signal 9) and is starting again"
    for path in ("/health", "/ping", "/ready"):
        answer = await served.http.get(path)
        assert answer.status_code == 503
        assert "signal 9" in answer.json()["error"]["message"]
    refused = await served.http.post(COMPLETIONS, json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    served.engine.state.alive = True
    assert (await served.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_while_draining_open_requests_go_on_and_new_ones_are_503(served: Served) -> None:
    served.engine.gate.clear()
    task = asyncio.create_task(served.http.post(COMPLETIONS, json={"prompt": "a"}))
    await eventually(lambda: served.engine.running)
    served.app.context.draining = True
    refused = await served.http.post(COMPLETIONS, json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert (await served.http.get("/ready")).status_code == 503
    assert (await served.http.get("/health")).status_code == 200
    served.engine.gate.set()
    assert (await task).status_code == 200


async def test_many_at_once_all_complete(served: Served) -> None:
    async def ask(number: int) -> int:
        body = {"prompt": f"number {number}", "stream": number % 2 == 0}
        return (await served.http.post(COMPLETIONS, json=body)).status_code

    assert set(await asyncio.gather(*map(ask, range(64)))) == {200}
    assert served.app.context.admission.open == 0
    assert not served.engine.running


async def test_an_unforeseen_failure_is_a_500_and_the_next_request_is_served(served: Served) -> None:
    served.engine.failure = ZeroDivisionError("inside")  # type: ignore[assignment]
    answer = await served.http.post(COMPLETIONS, json={"prompt": "a"})
    assert answer.status_code == 500
    assert "inside" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert "connection" not in answer.headers
    served.engine.failure = None
    assert (await served.http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_a_connection_is_kept_for_the_next_request(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, limits=httpx.Limits(max_connections=1)) as client:
        for body in ({"prompt": ""}, {"prompt": "a"}, {"prompt": "a", "stream": True}):
            answer = await client.post(COMPLETIONS, json=body)
            assert answer.headers.get("connection", "keep-alive") == "keep-alive"
