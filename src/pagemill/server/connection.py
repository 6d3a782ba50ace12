"""One HTTP connection: uvicorn's protocol, with bounds on time, size and number, and refusals in OpenAI's format.

Owns what happens before a request is whole and after an answer was handed over: heads that are too long, too many or
malformed (431, 414, 400), senders that take for ever (408, or closed), readers that stop reading, and more connections
than fit (the one idle longest goes). Must not know routes or bodies; whole requests are the application's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagemill.config import ServerConfig
from pagemill.server.body import IS_GONE
from pagemill.server.errors import error_body

__all__ = ["connection_class"]

MAX_URL_BYTES = 8192
UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})
LINGER_S = 2.0
"""How long a refused sender may still send (into nothing) so that it reads the answer and not a reset."""
STALL_S = 300.0
"""A reader that took no byte for so long is gone."""
MAX_UNSENT_BYTES = 256 * 1024 * 1024
"""Of all answers together that readers have not taken; past it, who has stalled longest is cut off."""


class _Shared:
    """What the connections of one server know of each other."""

    def __init__(self) -> None:
        self.idle: OrderedDict[Connection, None] = OrderedDict()
        """Connections without a whole request, idle longest first."""
        self.stalled: OrderedDict[Connection, None] = OrderedDict()
        """Connections whose reader is behind, longest first."""


class Connection(HttpToolsProtocol):
    """One of them; made by uvicorn. The class attributes are set by :func:`connection_class`."""

    limits: ServerConfig
    shared: _Shared

    _deadline_s: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0
    _head_count = 0
    _problem: tuple[int, str] | None = None
    _wants_upgrade = False
    _deaf = False
    """What still arrives is thrown away."""

    # ---- times ------------------------------------------------------------------------------------------------------

    def _expect_within(self, seconds: float | None) -> None:
        """What is being sent must be whole by then; None: nothing is being sent. Costs no timer per request."""
        self._deadline_s = None if seconds is None else self.loop.time() + seconds
        if self._timer is None and seconds is not None:
            self._timer = self.loop.call_later(seconds, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        if self._deadline_s is None or self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is us who do not read
            self._deadline_s = self.loop.time() + self.limits.timeout_read
        left_s = self._deadline_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._look_at_clock)
        elif not self._in_head and not self._is_receiving:
            self._close()  # connected, and never sent a byte
        else:
            part = "head" if self._in_head else "body"
            self._refuse(
                408,
                f"the request's {part} did not arrive within {self.limits.timeout_read:g} s (the server's"
                " --timeout-read); send it faster, or in smaller requests",
            )

    def _stop_clock(self) -> None:
        self._deadline_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _is_receiving(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        self.shared.stalled[self] = None
        self._watch_reader(self._unsent + 1)
        while sum(each._unsent for each in self.shared.stalled) > MAX_UNSENT_BYTES:
            self.shared.stalled.popitem(last=False)[0].transport.abort()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._forget_reader()

    @property
    def _unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def _watch_reader(self, unsent_before: int) -> None:
        unsent = self._unsent
        if unsent >= unsent_before:
            self.transport.abort()
            return
        self._stall_timer = self.loop.call_later(STALL_S, self._watch_reader, unsent)

    def _forget_reader(self) -> None:
        self.shared.stalled.pop(self, None)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # ---- life -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for a new one, or refuse it where every connection is at work."""
        super().connection_made(transport)
        idle = self.shared.idle
        if len(self.connections) > self.limits.max_connections:
            if not idle:
                self._refuse(503, "the server has as many connections as it may; try again in a moment")
                return
            idle.popitem(last=False)[0]._close()
        idle[self] = None
        self._expect_within(self.limits.timeout_read)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing of it may stay."""
        self.shared.idle.pop(self, None)
        self._forget_reader()
        self._stop_clock()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()

    def on_response_complete(self) -> None:
        """Idle again, unless requests wait in line."""
        goes_on = bool(self.pipeline)  # its next begins in the call below, and may be the last in line
        super().on_response_complete()
        if goes_on or self.transport.is_closing():
            return
        if self._deaf:
            self._close()
        else:
            self.shared.idle[self] = None

    # ---- what arrives -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser, within bounds."""
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._problem = self._problem or (400, "the request is not valid HTTP/1.1")
        if self._problem is None and self._in_head:
            self._check_head(self._head_bytes)
        if self._problem is not None:
            self._refuse(*self._problem)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._problem is None:
                self._decline_upgrade(data[upgrade.args[0] :])

    def _decline_upgrade(self, rest: bytes) -> None:
        """No other protocol is spoken here: parse the head again without that wish, and the body that follows it.

        (The parser would hand over the connection, body and all. HTTP clients that offer HTTP/2 send such requests.)
        """
        kept = [(name, value) for name, value in self.headers if name not in UPGRADE_HEADERS]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            kept.append((b"connection", b"close"))
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in kept]
        self._wants_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _check_head(self, size: int) -> None:
        most, most_lines = self.limits.h11_max_incomplete_event_size, self.limits.h11_max_header_count
        if size > most:
            self._problem = (
                431,
                (
                    f"the request's head has {size} bytes or more; the limit is {most} (the server's"
                    " --h11-max-incomplete-event-size)"
                ),
            )
        elif self._head_count > most_lines:
            self._problem = (
                431,
                (f"the request has more than {most_lines} headers (the server's --h11-max-header-count)"),
            )

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._head_count = 0
        self._expect_within(self.limits.timeout_read)

    def on_url(self, url: bytes) -> None:
        """Part of the address."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._problem = 414, f"the address has more than {MAX_URL_BYTES} bytes"

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; a body's trailers are counted and passed over."""
        self._head_count += 1
        if self._in_head and self._head_count <= self.limits.h11_max_header_count:
            super().on_header(name, value)
        elif not self._in_head:
            self._check_head(0)

    def on_headers_complete(self) -> None:
        """The head is whole: the application starts, unless it is too long."""
        if self._problem is None:
            self._check_head(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        if self._problem is None and self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._problem = 400, "the server is no proxy: CONNECT is not valid HTTP/1.1 here"
            self._wants_upgrade = True
        elif self._problem is None:
            self.scope["state"][IS_GONE] = self.transport.is_closing
            super().on_headers_complete()
            self._in_head = False
            self.shared.idle.pop(self, None)
            self._expect_within(self.limits.timeout_read)

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        if self._problem is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._problem is not None or self._wants_upgrade:
            return
        super().on_message_complete()
        self._expect_within(None)
        if self.cycle.response_complete:  # it was answered before it was whole
            self.cycle.more_body = False
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # ---- refusing ---------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close. An answer that is under way is not cut."""
        self._deaf = True
        self._stop_clock()
        cycle = self.cycle
        if cycle is not None and cycle.response_complete and cycle.more_body:
            self._close()  # it was answered long ago
            return
        if cycle is not None and not cycle.response_complete:
            if self.pipeline and cycle.more_body:
                self.pipeline.popleft()  # it waits in line, and its body never comes; the one before it is under way
                return
            if self.pipeline or cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = error_body(status, message)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        if status == 503:
            head += "retry-after: 1\r\n"
        self.transport.write(head.encode() + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self._close)
        else:
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def connection_class(config: ServerConfig) -> type[Connection]:
    """The protocol of one server."""
    attributes: dict[str, Any] = {"limits": config, "shared": _Shared(), "__doc__": Connection.__doc__}
    return type("Connection", (Connection,), attributes)
