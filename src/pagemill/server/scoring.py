"""POST /rerank and /score: how well texts go together.

Owns the answers' shapes; what is computed for a pair of texts is engine/pooling.py's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from pagemill.engine.pooling import Comparison, PoolingTexts
from pagemill.errors import RequestError
from pagemill.params import PoolingParams, RequestOutput
from pagemill.server.body import unless_gone
from pagemill.server.context import ServerContext, json_response
from pagemill.server.embeddings import pool, usage_of
from pagemill.server.generation import response_id
from pagemill.server.offload import off_loop
from pagemill.server.pooling_schema import RerankRequest, ScoreRequest
from pagemill.server.protocol import answer_headers

__all__ = ["create_score", "rerank"]


async def rerank(context: ServerContext, request: Request) -> Response:
    """Documents in the order in which they answer a query, best first."""
    asked = await context.read(request, RerankRequest)
    context.check_model(asked.model)
    documents = [each if isinstance(each, str) else each.text for each in asked.documents]
    request_id = response_id("rerank", asked.request_id)
    scores, outputs = await unless_gone(
        request.receive, _scores(context, [asked.query], documents, ("query", "documents"), request_id, asked)
    )
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = []
    for index in order[: asked.top_n or len(order)]:
        result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
        if asked.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    answer = {"id": request_id, "model": context.model_name, "results": results, "usage": usage_of(outputs)}
    return json_response(answer, answer_headers(request_id, asked))


async def create_score(context: ServerContext, request: Request) -> Response:
    """The score of each pair of texts; one text goes with all of the others."""
    asked = await context.read(request, ScoreRequest)
    context.check_model(asked.model)
    first = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    second = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    request_id = response_id("score", asked.request_id)
    scores, outputs = await unless_gone(
        request.receive, _scores(context, first, second, ("text_1", "text_2"), request_id, asked)
    )
    answer = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": context.model_name,
        "data": [{"object": "score", "index": index, "score": value} for index, value in enumerate(scores)],
        "usage": usage_of(outputs),
    }
    return json_response(answer, answer_headers(request_id, asked))


async def _scores(
    context: ServerContext,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    request_id: str,
    asked: RerankRequest | ScoreRequest,
) -> tuple[list[float], list[RequestOutput]]:
    """One score for each pair, and what was computed for them."""
    compared = Comparison(context.engine.pooling, first, second, names)
    limit, count = context.admission.limit, len(first) + len(second)
    if count > limit:
        raise RequestError(
            f"{count} texts are asked about; the limit is {limit} (the server's --max-num-queued-reqs)", param=names[1]
        )
    texts = PoolingTexts(context.engine.tokenizer, context.engine.max_model_len)
    params = PoolingParams(truncate_prompt_tokens=asked.truncate_prompt_tokens)
    prompts = await off_loop(compared.num_chars, lambda: compared.inputs(texts, params))
    outputs = await pool(context, prompts, request_id, asked)
    return compared.scores(outputs, activate=asked.use_activation is not False), outputs
