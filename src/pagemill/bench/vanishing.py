"""Clients that connect, send and are gone: at random points of the connection, the request and the answer.

Owns one such client. The server must not notice it for longer than a step; tests count what is left, a benchmark what
it costs the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

__all__ = ["POINTS", "vanish"]

POINTS = ("connected", "head", "body", "sent", "answered", "reading", "half closed")
"""Where a client goes: after connecting, within the head or the body, some time after it sent everything, with the
answer's first bytes, after some of the answer, or by closing its own side only."""


async def vanish(
    port: int,
    path: str,
    body: dict[str, Any],
    chance: random.Random,
    *,
    host: str = "127.0.0.1",
    longest_s: float = 0.5,
) -> str:
    """Be such a client, for ``longest_s`` after sending at most; returns the point where it went."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    point = chance.choice(POINTS)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if point == "head":
            writer.write(head[: chance.randrange(1, len(head))])
        elif point == "body":
            writer.write(head + content[: chance.randrange(len(content))])
        elif point != "connected":
            writer.write(head + content)
            await _go_on(point, reader, writer, chance, longest_s)
        await writer.drain()
    except ConnectionError:
        pass  # the server was quicker
    finally:
        if chance.random() < 0.5:
            writer.transport.abort()
        writer.close()
    return point


async def _go_on(
    point: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random, longest_s: float
) -> None:
    """What is done after everything was sent."""
    if point == "half closed":
        writer.write_eof()
    elif point == "sent":
        await asyncio.sleep(chance.random() * longest_s)
    else:
        with contextlib.suppress(TimeoutError):  # it has read all there was
            async with asyncio.timeout(longest_s):
                for _ in range(1 if point == "answered" else chance.randrange(20)):
                    await reader.read(chance.randrange(1, 4096))
