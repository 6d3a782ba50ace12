"""What the server says about itself: models, health, readiness, metrics, version, the web page.

Health answers from the engine's heartbeat, never by asking the engine: it must be quick under full load.
"""

from __future__ import annotations

import functools
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from pagemill.errors import ModelNotFoundError
from pagemill.server.context import ServerContext, json_response
from pagemill.server.errors import error_response

__all__ = ["get_model", "health", "kv_blocks", "list_models", "metrics", "page_file", "ready", "server_version"]

STARTED = int(time.time())
PAGE_FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "blocks.js": "text/javascript; charset=utf-8",
}
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"


async def list_models(context: ServerContext, request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model_card(context)]})


async def get_model(context: ServerContext, request: Request) -> Response:
    """The model by its name; 404 for any other."""
    name = request.path_params["model_id"]
    if name != context.model_name:
        raise ModelNotFoundError(f"the model {name[:200]!r} does not exist; this server has {context.model_name!r}")
    return json_response(_model_card(context))


def _model_card(context: ServerContext) -> dict[str, object]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "pagemill",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
    }


async def health(context: ServerContext, request: Request) -> Response:
    """200 while the engine steps or waits for work, 503 with the reason otherwise."""
    state = context.engine.health()
    if state.alive:
        return json_response({"status": "ok"})
    return error_response(503, state.reason or "the engine is not running", headers={"retry-after": "1"})


async def ready(context: ServerContext, request: Request) -> Response:
    """Like health, and 503 too while the server drains."""
    if context.draining:
        return error_response(503, "the server is shutting down and takes no new requests")
    return await health(context, request)


async def metrics(context: ServerContext, request: Request) -> Response:
    """Prometheus' text format."""
    text: str = context.engine.metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def kv_blocks(context: ServerContext, request: Request) -> Response:
    """The KV blocks by state, a letter for each: f free, c cached, p private (one holder), s shared."""
    return json_response({"groups": await context.block_map.groups()})


async def server_version(context: ServerContext, request: Request) -> Response:
    """Pagemill's version."""
    return json_response({"version": installed_version()})


@functools.cache
def installed_version() -> str:
    """From the package's metadata."""
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0"


async def page_file(context: ServerContext, request: Request) -> Response:
    """The web page and its parts; nothing else is ever read from disk."""
    name = request.path_params.get("name", "index.html")
    if name not in PAGE_FILES:
        return error_response(404, f"there is no {request.url.path[:200]}")
    headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(_page_bytes(name), media_type=PAGE_FILES[name], headers=headers)


@functools.cache
def _page_bytes(name: str) -> bytes:
    return (files("pagemill.server") / "page" / name).read_bytes()
