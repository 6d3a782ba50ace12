"""Long texts leave the event loop alone, very long ones also each other, and nobody works for a client that is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.requests import Request

from pagemill.errors import QueueFullError
from pagemill.server import offload
from pagemill.server.body import IS_GONE, ClientDisconnect, go_on_without_client, read_body
from pagemill.server.offload import INLINE_CHARS, LARGE_CHARS, off_loop
from tests.server.conftest import Served
from tests.server.test_lifecycle import eventually


async def test_the_length_decides_who_works() -> None:
    here = await off_loop(INLINE_CHARS, threading.current_thread)
    thread = await off_loop(INLINE_CHARS + 1, threading.current_thread)
    longest = await off_loop(LARGE_CHARS + 1, threading.current_thread)
    assert here is threading.main_thread()
    assert len({here, thread, longest}) == 3
    assert longest.name.startswith("pagemill-long-text")


async def test_very_long_texts_are_worked_on_one_after_another() -> None:
    at_work: list[int] = []
    both = threading.Barrier(2)

    def work(number: int) -> int:
        at_work.append(number)
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(0)  # nobody else is here
        both.reset()
        return at_work.pop()

    assert await asyncio.gather(*(off_loop(LARGE_CHARS + 1, lambda n=n: work(n)) for n in range(5))) == list(range(5))


async def test_few_very_long_texts_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MOST_WAITING", 2)
    held = threading.Event()
    waiting = [asyncio.create_task(off_loop(LARGE_CHARS + 1, held.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 texts"):
        await off_loop(LARGE_CHARS + 1, held.wait)
    held.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await off_loop(LARGE_CHARS + 1, held.wait)


def request_of(gone: list[bool]) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "headers": [], "state": {IS_GONE: lambda: bool(gone)}}
    return Request(scope, receive)  # type: ignore[arg-type]


async def test_a_body_whose_sender_is_gone_is_not_read_further() -> None:
    gone: list[bool] = []
    assert await read_body(request_of(gone), 100) == b"{}"
    gone.append(True)
    with pytest.raises(ClientDisconnect):
        await read_body(request_of(gone), 100)


async def test_the_text_of_a_client_that_went_while_it_waited_is_passed_over() -> None:
    gone: list[bool] = []
    await read_body(request_of(gone), 100)
    held, done = threading.Event(), []
    first = asyncio.create_task(off_loop(LARGE_CHARS + 1, held.wait))
    second = asyncio.create_task(off_loop(LARGE_CHARS + 1, lambda: done.append(1)))
    await asyncio.sleep(0)
    gone.append(True)
    held.set()
    for each in (first, second):
        with pytest.raises(ClientDisconnect):
            await each
    assert not done
    go_on_without_client()
    assert await off_loop(LARGE_CHARS + 1, lambda: 5) == 5


@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_sends_and_hangs_up_reaches_no_tokenizer(
    served: Served, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    """What comes in one piece with the end of the connection is known to be for nobody."""
    parsed = []
    monkeypatch.setattr(served.app.context.engine.tokenizer, "encode", lambda *_, **__: parsed.append(1) or [1])
    _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"prompt": "a"}')
    if reset:
        writer.transport.abort()
    writer.close()
    state = served.server.server_state
    await eventually(lambda: state.total_requests == 1 and not state.tasks and not state.connections)
    assert not parsed
