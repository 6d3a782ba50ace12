"""The outermost layer: who may come in, and no exception leaves without an answer in OpenAI's format.

Plain ASGI, because a middleware class between the server and a stream would be paid for with every token. Denies by
default: a route is open only if it is named here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.engine.caller import CALLER, Caller
from pagemill.errors import PagemillError, RequestTimeoutError, ShuttingDownError
from pagemill.server.body import ClientDisconnect
from pagemill.server.context import BODY_BYTES, ServerContext
from pagemill.server.errors import error_response, problem_response
from pagemill.server.sse import error_event

__all__ = ["Gate"]

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Probes have no key."""
ALWAYS_ANSWERED = OPEN_PATHS | {"/metrics", "/version"}
"""Also while the server drains."""
HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing and compute nothing."""

Headers = list[tuple[bytes, bytes]]

logger = logging.getLogger("pagemill.server")


class Gate:
    """ASGI application around the application."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self.context = context
        config = context.config
        self._enter: ASGIApp = self._admit
        self._cors: CORSMiddleware | None = None
        if config.allowed_origins:
            self._enter = self._cors = CORSMiddleware(
                self._admit,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                expose_headers=("x-request-id", "x-pagemill-ignored", "retry-after"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Other sites' pages, the key, draining; then the application with its exceptions answered."""
        if scope["type"] == "http":
            await self._enter(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s, noted = time.monotonic(), _Noted(send)
        try:
            await self._pass(scope, receive, noted)
        finally:
            self.context.memory.note(scope.get(BODY_BYTES, 0))
            if noted.status >= 400:
                self.context.log.refused(CALLER.get(), scope["method"], noted.status, time.monotonic() - began_s)

    async def _pass(self, scope: Scope, receive: Receive, noted: _Noted) -> None:
        path, headers = scope["path"], scope["headers"]
        caller = Caller(route=path, address=(scope["client"] or ("",))[0], trace=self._trace(headers))
        CALLER.set(caller)
        if scope["method"] not in HARMLESS and self._is_from_another_site(headers):
            answer = error_response(
                403, "pages of other web sites may not use this server; allow theirs with --allowed-origins"
            )
            await answer(scope, receive, noted.send)
            return
        if path not in OPEN_PATHS and self.context.keys.required:
            key = self.context.keys.admit(headers)
            if key is None:
                await _no_key(path)(scope, receive, noted.send)
                return
            tenant = "" if self.context.config.share_prefix_cache else key.identity.hex()
            CALLER.set(replace(caller, name=key.name, identity=key.identity, tenant=tenant))
        if self.context.draining and path not in ALWAYS_ANSWERED:
            error = ShuttingDownError("the server is shutting down and takes no new requests; try another, or later")
            answer = problem_response(error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, noted.send)
            return
        limit_s = self.context.config.request_timeout
        if not limit_s:
            await self._guarded(scope, receive, noted)
            return
        watch = _TimeLimit(limit_s)
        try:
            await self._guarded(scope, receive, noted)
        except asyncio.CancelledError:
            if not watch.is_over:
                raise
            await watch.answer(scope, receive, noted)
        finally:
            watch.end()

    def _trace(self, headers: Headers) -> tuple[tuple[str, str], ...]:
        if not self.context.traces:
            return ()
        return tuple(
            (name.decode(), value.decode("latin-1"))
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        )

    def _is_from_another_site(self, headers: Headers) -> bool:
        """What a browser sends for a page of another site, without asking (CORS would only hide the answer from it)."""
        found = {name: value for name, value in headers if name in (b"sec-fetch-site", b"origin")}
        if found.get(b"sec-fetch-site") != b"cross-site":
            return False
        return self._cors is None or not self._cors.is_allowed_origin(found.get(b"origin", b"").decode("latin-1"))

    async def _guarded(self, scope: Scope, receive: Receive, noted: _Noted) -> None:
        try:
            await self._app(scope, receive, noted.send)
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, PagemillError):
                logger.exception("%s %s failed", scope["method"], scope["path"][:200])
            if noted.status:
                raise
            await problem_response(error)(scope, receive, noted.send)


class _Noted:
    """``send``, but seeing how the answer begins."""

    __slots__ = ("_send", "status", "streams")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """0 until the answer has begun."""
        self.streams = False

    async def send(self, message: Message) -> None:
        """Pass it on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for name, value in message["headers"] if name == b"content-type"]
            self.streams = bool(kinds) and kinds[0].startswith(b"text/event-stream")
        await self._send(message)


def _no_key(path: str) -> Response:
    return error_response(
        401,
        "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"www-authenticate": "Basic realm=pagemill" if path == "/" else "Bearer"},
    )


class _TimeLimit:
    """Cancels the running task when its time is over, and knows how to answer for it."""

    def __init__(self, limit_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.is_over = False
        self._limit_s = limit_s
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._cancel)

    def _cancel(self) -> None:
        self.is_over = True
        self._task.cancel()

    def end(self) -> None:
        """The request has ended."""
        self._timer.cancel()

    async def answer(self, scope: Scope, receive: Receive, noted: _Noted) -> None:
        """504; as an event where a stream has begun. Half an answer of another kind is left at that."""
        self._task.uncancel()
        error = RequestTimeoutError(
            f"the request was not done within {self._limit_s:g} s (the server's --request-timeout); ask for less, or"
            " try again later"
        )
        if not noted.status:
            await problem_response(error)(scope, receive, noted.send)
        elif noted.streams:
            await noted.send({"type": "http.response.body", "body": error_event(error), "more_body": False})
