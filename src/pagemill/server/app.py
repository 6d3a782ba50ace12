"""The HTTP application: routes, their place in the OpenAPI schema, and errors in OpenAI's format.

FastAPI routes and documents; reading bodies and writing streams is done by the handlers themselves, on ASGI.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagemill.config import ServerConfig
from pagemill.engine.pooling import check_generates
from pagemill.errors import PagemillError
from pagemill.server import chat, completions, embeddings, info, scoring, tokenization
from pagemill.server.answer_schemas import (
    BlockMapResponse,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfoResponse,
    VersionResponse,
)
from pagemill.server.body import ClientDisconnect
from pagemill.server.context import ServerContext
from pagemill.server.engine_port import Engine
from pagemill.server.errors import error_response, problem_response
from pagemill.server.gate import Gate
from pagemill.server.keys import Keys
from pagemill.server.openapi import STREAMED, described, document
from pagemill.server.pooling_schema import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolRequest,
    PoolResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from pagemill.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagemill.server.responses_api import handlers as responses
from pagemill.server.responses_api.request import ResponsesRequest
from pagemill.server.responses_api.schemas import DeletedResponse, InputTokens, ResponseItemList, ResponseObject

__all__ = ["build_app"]

logger = logging.getLogger("pagemill.server")

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

POSTS: tuple[tuple[str, Handler, type[BaseModel], type[BaseModel]], ...] = (
    ("/v1/completions", completions.create_completion, CompletionRequest, CompletionResponse),
    ("/v1/chat/completions", chat.create_chat_completion, ChatCompletionRequest, ChatCompletionResponse),
    ("/v1/responses", responses.create_response, ResponsesRequest, ResponseObject),
    ("/v1/responses/input_tokens", responses.count_input_tokens, ResponsesRequest, InputTokens),
    ("/v1/embeddings", embeddings.create_embedding, EmbeddingRequest, EmbeddingResponse),
    ("/pooling", embeddings.create_pooling, PoolRequest, PoolResponse),
    ("/classify", embeddings.classify, ClassifyRequest, ClassifyResponse),
    ("/rerank", scoring.rerank, RerankRequest, RerankResponse),
    ("/v1/rerank", scoring.rerank, RerankRequest, RerankResponse),
    ("/v2/rerank", scoring.rerank, RerankRequest, RerankResponse),
    ("/score", scoring.create_score, ScoreRequest, ScoreResponse),
    ("/v1/score", scoring.create_score, ScoreRequest, ScoreResponse),
    ("/tokenize", tokenization.tokenize, TokenizeRequest, TokenizeResponse),
    ("/detokenize", tokenization.detokenize, DetokenizeRequest, DetokenizeResponse),
)
PROBES: dict[str, Handler] = {"/health": info.health, "/ping": info.health, "/ready": info.ready}
"""Asked by GET or HEAD."""
GETS: tuple[tuple[str, Handler, type[BaseModel] | None], ...] = (
    ("/v1/models", info.list_models, ModelList),
    ("/v1/models/{model_id:path}", info.get_model, ModelCard),
    ("/v1/responses/{response_id}", responses.get_response, ResponseObject),
    ("/v1/responses/{response_id}/input_items", responses.list_input_items, ResponseItemList),
    *((path, handler, HealthResponse) for path, handler in PROBES.items()),
    ("/metrics", info.metrics, None),
    ("/tokenizer_info", tokenization.tokenizer_info, TokenizerInfoResponse),
    ("/kv_blocks", info.kv_blocks, BlockMapResponse),
    ("/version", info.server_version, VersionResponse),
)
OTHERS: tuple[tuple[str, str, Handler, type[BaseModel]], ...] = (
    ("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response, ResponseObject),
    ("DELETE", "/v1/responses/{response_id}", responses.delete_response, DeletedResponse),
)


def build_app(engine: Engine, config: ServerConfig, keys: Keys | None = None) -> Gate:
    """The ASGI application; ``app.context`` holds what the runner needs. Without ``keys``, those of ``config``."""
    context = ServerContext(engine, config, keys)
    app = FastAPI(
        title="Pagemill", version=info.installed_version(), docs_url=None, redoc_url=None, redirect_slashes=False
    )
    routes: list[tuple[str, str, Handler, type[BaseModel] | None, type[BaseModel] | None]] = [
        *(("POST", *each) for each in POSTS),
        *(("GET", path, handler, None, shown) for path, handler, shown in GETS),
        *((method, path, handler, None, shown) for method, path, handler, shown in OTHERS),
    ]
    for method, path, handler, asked, answered in routes:
        app.add_api_route(
            path,
            _bound(handler, context, generates=method == "POST" and path in STREAMED),
            name=f"{handler.__name__}{path.replace('/', '_')}",
            description=handler.__doc__,
            response_class=Response,
            **described(method, path, asked, answered),
        )
    for path, handler in PROBES.items():  # load balancers ask without wanting a body
        app.add_api_route(path, _bound(handler, context), methods=["HEAD"], include_in_schema=False)
    for path in ("/", "/page/{name}"):
        app.add_api_route(path, _bound(info.page_file, context), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(PagemillError, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_exception)
    bodies = [asked for _, _, _, asked, _ in routes if asked is not None]
    answers = [answered for *_, answered in routes if answered is not None]
    app.openapi = lambda: document(app, bodies, answers)  # type: ignore[method-assign]
    return Gate(app, context)


def _bound(
    handler: Handler, context: ServerContext, *, generates: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            if generates:
                check_generates(context.engine.pooling)
            return await handler(context, request)
        except (PagemillError, HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            # Answered here: further out Starlette would send its own text and uvicorn would drop the connection.
            logger.exception("%s %s failed", request.method, request.url.path[:200])
            return problem_response(error)

    return endpoint


async def _on_problem(request: Request, error: Exception) -> Response:
    return problem_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = f"{request.method} {request.url.path}"[:200]
    if error.status_code == 404:
        return error_response(404, f"there is no {shown}", code="not_found")
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        return error_response(
            405, f"{shown} is not allowed; use {allowed.get('Allow', 'another method')}", headers=allowed
        )
    return error_response(error.status_code, str(error.detail))
