"""Request bodies and vanished clients, at the level of ASGI messages.

Owns the size bound (checked against Content-Length and while reading, before anything is parsed) and the watch for a
client that goes away. Must not parse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from pagemill.errors import PayloadTooLargeError

__all__ = [
    "IS_GONE",
    "ClientDisconnect",
    "cancelled_by_disconnect",
    "go_on_without_client",
    "raise_if_gone",
    "read_body",
    "until_gone",
]

IS_GONE = "pagemill.is_gone"
"""Where the state in the scope of a request has a function that says whether its connection is closed."""

T = TypeVar("T")


def _never() -> bool:
    return False


_is_gone: ContextVar[Callable[[], bool]] = ContextVar("is_gone", default=_never)


def go_on_without_client() -> None:
    """What the current task does is done whether or not its client stays."""
    _is_gone.set(_never)


def raise_if_gone() -> None:
    """Raise ClientDisconnect where the client of the request that is worked on has gone; known without waiting."""
    if _is_gone.get()():
        raise ClientDisconnect


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises PayloadTooLargeError as soon as it is known to be over ``limit`` bytes.

    ClientDisconnect where the client has sent it and is gone.
    """
    _is_gone.set(request.scope.get("state", {}).get(IS_GONE, _never))
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    body = b""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body = message.get("body", b"")
        size += len(body)
        if size > limit:
            raise _too_large(size, limit)
        parts.append(body)
        if not message.get("more_body", False):
            await asyncio.sleep(0)  # the event loop has not looked at what came after the body yet
            raise_if_gone()
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(size: int, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body has {size} bytes or more; the limit is {limit} (the server's --max-body-bytes)"
    )


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class cancelled_by_disconnect:  # noqa: N801  (reads as a statement: async with cancelled_by_disconnect(receive))
    """Within the block, a client that goes away cancels the current task; then ``gone`` is set and nothing is raised.

    One task watches; it costs nothing until the connection closes.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive
        self._owner: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> cancelled_by_disconnect:
        self._owner = asyncio.current_task()
        self._watch = asyncio.create_task(until_gone(self._receive))
        self._watch.add_done_callback(self._on_watch_end)
        return self

    def _on_watch_end(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is None and self._owner is not None:
            self.gone = True
            self._owner.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        owner, self._owner = self._owner, None
        assert self._watch is not None
        self._watch.cancel()
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert owner is not None
            owner.uncancel()
            return True
        return False


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; raises ClientDisconnect, with the work cancelled, when the client goes away first."""
    watched = cancelled_by_disconnect(receive)
    async with watched:
        return await work
    raise ClientDisconnect
