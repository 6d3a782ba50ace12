"""Clients that connect, send and are gone: at random points of the connection, the request and the answer.

Owns one such client, and one that asks the same and stays. The server must not notice the former for longer than a
step; tests count what is left, a benchmark what it costs the others. A client is a bare socket, so that a crowd takes
little of the machine that it shares with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from typing import Any

__all__ = ["POINTS", "stay", "vanish"]

POINTS = ("connected", "head", "body", "sent", "answered", "reading", "half closed")
"""Where a client goes: after connecting, within the head or the body, some time after it sent everything, with the
answer's first bytes, after some of the answer, or by closing its own side only."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


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
    head, content = _request(host, path, body)
    point = chance.choice(POINTS)
    loop = asyncio.get_running_loop()
    with _socket(host) as connection, contextlib.suppress(ConnectionError):  # the server may be quicker
        await loop.sock_connect(connection, (host, port))
        if point == "head":
            await loop.sock_sendall(connection, head[: chance.randrange(1, len(head))])
        elif point == "body":
            await loop.sock_sendall(connection, head + content[: chance.randrange(len(content))])
        elif point != "connected":
            await loop.sock_sendall(connection, head + content)
            await _go_on(point, connection, chance, longest_s)
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return point


async def _go_on(point: str, connection: socket.socket, chance: random.Random, longest_s: float) -> None:
    """What is done after everything was sent."""
    if point == "half closed":
        connection.shutdown(socket.SHUT_WR)
    elif point == "sent":
        await asyncio.sleep(chance.random() * longest_s)
    else:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):  # it has read all there was
            async with asyncio.timeout(longest_s):
                for _ in range(1 if point == "answered" else chance.randrange(20)):
                    await loop.sock_recv(connection, chance.randrange(1, 4096))


async def stay(port: int, path: str, body: dict[str, Any], *, host: str = "127.0.0.1") -> bytes:
    """Ask the same and wait for the whole answer; returns it."""
    head, content = _request(host, path, body, "connection: close\r\n")
    loop = asyncio.get_running_loop()
    with _socket(host) as connection:
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, head + content)
        parts = []
        while part := await loop.sock_recv(connection, 65536):
            parts.append(part)
    return b"".join(parts)


def _request(host: str, path: str, body: dict[str, Any], more: str = "") -> tuple[bytes, bytes]:
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{more}content-length: {len(content)}\r\n\r\n".encode(), content


def _socket(host: str) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.setblocking(False)
    return connection
