"""Bytes that were requests once: whatever is done to them, the server answers in HTTP, reads nothing twice, and lives.

A stream of requests is damaged, cut anywhere, and sent whole and in pieces. The answers may not depend on the cuts,
because a proxy before the server cuts as it likes; but for the last one, where a fault may be seen before or after the
request before it was answered.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from pagemill.config import ServerConfig
from pagemill.server import listen
from pagemill.server.app import build_app
from tests.server.fake_engine import FakeEngine

REFUSAL = 400, b""
REFUSED = (b"400", b"414", b"431")
"""Which one depends on what is seen first."""
TURNS = 30
"""Of the event loop: enough for any of the requests to be answered."""

CHUNKED = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
REQUESTS = [
    b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /version HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    b"HEAD /version HTTP/1.1\r\nhost: x\r\n\r\n",
    b'POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"prompt": "a"}',
    b'POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 15\r\n\r\n{"prompt": "b"}',
    CHUNKED + b'f\r\n{"prompt": "c"}\r\n0\r\n\r\n',
    CHUNKED + b'7;ext="a"\r\n{"promp\r\n8\r\nt": "d"}\r\n0\r\ntrailer: v\r\n\r\n',
    b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n",
    b"DELETE /version HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
]
PIECES = [
    *(b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b"\xff", b"\r\n\r\n", b"0\r\n\r\n", b"\x0b", b"+", b"-", b";"),
    *(b"content-length: 4\r\n", b"content-length: 0015\r\n", b"content-length: +15\r\n", b"content-length: 15, 15\r\n"),
    *(b"content-length : 3\r\n", b"Content-Length:15\r\n", b"content-length: 99999999999999999999\r\n"),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"transfer-encoding: identity\r\n"),
    *(b"transfer-encoding: chunked, chunked\r\n", b"transfer-encoding:\x0bchunked\r\n", b" folded: x\r\n"),
    *(
        b"connection: close\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\n",
        b"host: y\r\n",
        b"ffffffffffffffff\r\n",
    ),
    *(b"GET /version HTTP/1.1\r\n", b"x" * 9000, b"a: b\r\n" * 300, b"HTTP/1.1 200 OK\r\n\r\n", b"\x16\x03\x01"),
]


def damaged(chance: random.Random) -> bytes:
    """A few requests in a row, most of them hurt somewhere."""
    stream = b"".join(chance.choices(REQUESTS, k=chance.randrange(1, 4)))
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(stream))
        until = at + chance.choice([0, 0, 1, 2, 9])
        stream = stream[:at] + chance.choice([*PIECES, b"", b"", bytes([chance.randrange(256)])]) + stream[until:]
    return stream


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    resume_reading = set_write_buffer_limits = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0


async def answers(settings: uvicorn.Config, pieces: list[bytes]) -> list[tuple[int, bytes]]:
    """Status and body of each answer."""
    wire, state = Wire(), ServerState()
    connection = settings.http_protocol_class(config=settings, server_state=state, app_state={})
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            connection.data_received(piece)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    connection.connection_lost(None)  # whoever still waits for a body learns that none will come
    await asyncio.gather(*state.tasks)
    return parsed(wire.written)


def parsed(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        version, status = head.split(b" ", 2)[:2]
        assert version in (b"HTTP/1.1", b"HTTP/1.0")
        if status == b"100":
            continue
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(lines.get(b"content-length", b"0"))
        if not data or data.startswith(b"HTTP/1."):
            length = 0  # an answer to HEAD has no body
        assert len(data) >= length
        refused = status in REFUSED and b"close" in lines.get(b"connection", b"")
        found.append(REFUSAL if refused else (int(status), data[:length]))
        data = data[length:]
    return found


@pytest.mark.parametrize("count", [500, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_damaged_requests_are_answered_alike_however_they_are_cut(count: int) -> None:
    engine, config = FakeEngine(), ServerConfig()
    settings = listen.settings(build_app(engine, config), config)
    chance = random.Random(count)
    for _ in range(count):
        stream = damaged(chance)
        cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(6)))
        pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        whole, cut = await answers(settings, [stream]), await answers(settings, pieces)
        assert all(status < 500 for status, _ in whole + cut), stream
        refused = REFUSAL in (whole[-1:] + cut[-1:])  # or answered before the fault was seen
        common = min(len(whole), len(cut)) - (refused or len(whole) != len(cut))
        assert whole[:common] == cut[:common], stream
    assert not engine.running
