"""The outermost layer: who may come in, and no exception leaves without an answer in OpenAI's format.

Plain ASGI, because a middleware class between the server and a stream would be paid for with every token. Denies by
default: a route is open only if it is named here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import PagemillError, ShuttingDownError
from pagemill.server.body import ClientDisconnect
from pagemill.server.context import ServerContext
from pagemill.server.errors import error_response, problem_response

__all__ = ["Gate", "Keys", "caller"]

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Probes have no key."""
ALWAYS_ANSWERED = OPEN_PATHS | {"/metrics", "/version"}
"""Also while the server drains."""

logger = logging.getLogger("pagemill.server")


class Keys:
    """The API keys, hashed; comparing takes the same time whatever was sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """The digest of what was sent; empty for everybody where no key is asked for."""
        return _digest(_credentials(headers) or b"") if self._digests else b""

    def admit(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether no key is asked for, or one of them was sent: as a bearer token, or by a browser as a password."""
        if not self._digests:
            return True
        given = _credentials(headers)
        if given is None:
            return False
        digest = _digest(given)
        matches = sum(hmac.compare_digest(digest, known) for known in self._digests)
        return matches > 0


def caller(request: Request) -> bytes:
    """Who asks: the digest of the key that let the request in; empty where none is needed."""
    digest: bytes = request.scope["pagemill.caller"]
    return digest


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _credentials(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    found = {name: value for name, value in headers if name in (b"authorization", b"origin", b"host")}
    scheme, _, value = found.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() != b"basic":
        return None
    # A browser adds a stored password to what other sites send here, too: their Origin gives them away.
    origin = found.get(b"origin")
    if origin is not None and urlsplit(origin.decode("latin-1")).netloc != found.get(b"host", b"").decode("latin-1"):
        return None
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None


class Gate:
    """ASGI application around the application."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self.context = context
        self._keys = Keys(context.config.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Key, draining, then the application with its exceptions answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path not in OPEN_PATHS and not self._keys.admit(scope["headers"]):
            wants_page = path == "/"
            answer = error_response(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Basic realm=pagemill" if wants_page else "Bearer"},
            )
            await answer(scope, receive, send)
            return
        if self.context.draining and path not in ALWAYS_ANSWERED:
            error = ShuttingDownError("the server is shutting down and takes no new requests; try another, or later")
            answer = problem_response(error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
            return
        scope["pagemill.caller"] = self._keys.caller(scope["headers"])
        await self._guarded(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, PagemillError):
                logger.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await problem_response(error)(scope, receive, send)
