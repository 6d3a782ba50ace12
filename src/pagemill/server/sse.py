"""Server-sent events as OpenAI writes them, cheaply: of each event only what changes is encoded.

:class:`EventStream` sends what an async generator of bytes yields straight to ASGI; it owns the ends of a stream: a
failure before the first event is an ordinary HTTP error, one after it is an error event, and ``done`` comes last in any
case. Headers leave with the first event, not before, so that a refused request has its real status.
:class:`ChunkWriter` is the template of one response's events. Nothing here knows the engine.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.errors import PagemillError
from pagemill.server.body import cancelled_by_disconnect
from pagemill.server.errors import problem_body, problem_response

__all__ = ["DONE", "ChunkWriter", "EventStream", "error_event"]

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
encode = msgspec.json.encode
logger = logging.getLogger("pagemill.server")


class EventStream(Response):
    """A response whose body is a stream of events."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str], *, done: bytes = DONE) -> None:
        super().__init__(status_code=200)
        self._events = events
        self._done = done
        self._extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; a client that goes away closes the generator, and with it the request."""
        async with cancelled_by_disconnect(receive):
            try:
                await self._run(scope, receive, send)
            finally:
                await self._events.aclose()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._events
        try:
            first = await anext(events, b"")
        except Exception as error:  # noqa: BLE001  (whatever it is, the client gets an answer)
            _log(error)
            await problem_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS + self._extra})
        message: dict[str, Any] = {"type": "http.response.body", "body": first, "more_body": True}
        last = self._done
        try:
            await send(message)
            async for piece in events:
                message["body"] = piece
                await send(message)
        except Exception as error:  # noqa: BLE001
            _log(error)
            last = error_event(error, self._done)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def error_event(error: BaseException, done: bytes = DONE) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + problem_body(error) + b"\n\n" + done


def _log(error: BaseException) -> None:
    if not isinstance(error, PagemillError):
        logger.error("a stream failed", exc_info=error)


class ChunkWriter:
    """Writes the events of one response.

    ``kind`` "text" is /v1/completions, "chat" is /v1/chat/completions. ``usage_null`` puts ``"usage":null`` into the
    events that carry none, as OpenAI does once a client has asked for usage.
    """

    def __init__(
        self, kind: Literal["text", "chat"], response_id: str, created: int, model: str, *, usage_null: bool
    ) -> None:
        self._kind = kind
        name = b"text_completion" if kind == "text" else b"chat.completion.chunk"
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode(response_id),
            name,
            created,
            encode(model),
        )
        self._tail = b'],"usage":null}\n\n' if usage_null else b"]}\n\n"
        middle = b',"text":' if kind == "text" else b',"delta":{"content":'
        self._openings = [self._head + b'{"index":%d' % index + middle for index in range(16)]
        self._middle = middle
        self._closing = b',"logprobs":null,"finish_reason":null}'
        if kind == "chat":
            self._closing = b"}" + self._closing
        self._plain_end = self._closing + self._tail

    def text(self, index: int, text: str) -> bytes:
        """The event that there are most of: some more text of one choice."""
        opening = self._openings[index] if index < 16 else self._head + b'{"index":%d' % index + self._middle
        return opening + encode(text) + self._plain_end

    def choice(
        self,
        index: int,
        content: dict[str, Any] | str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
        usage: dict[str, Any] | None = None,
        beside: dict[str, Any] | None = None,
    ) -> bytes:
        """Any other event of one choice; ``content`` is the text, or for chat the delta.

        ``extra`` goes into the choice, ``beside`` beside the choices.
        """
        choice: dict[str, Any] = {"index": index}
        choice["text" if self._kind == "text" else "delta"] = content
        choice["logprobs"] = logprobs
        choice["finish_reason"] = finish_reason
        if extra:
            choice |= extra
        tail = self._tail if usage is None else b'],"usage":' + encode(usage) + b"}\n\n"
        if beside:
            tail = b"]," + encode(beside)[1:-1] + tail[1:]
        return self._head + encode(choice) + tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last event where usage was asked for: no choices."""
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n"
