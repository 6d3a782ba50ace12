"""POST /v1/embeddings, /pooling and /classify.

Owns how inputs are read and how vectors and classes are written. Vectors are encoded one after another, and the event
loop gets its turn between them: an answer may hold millions of numbers.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.engine.pooling import (
    PoolingPrompt,
    PoolingTexts,
    Vector,
    check_classifies,
    check_embeds,
    check_pools,
    class_scores,
    embedding,
)
from pagemill.errors import RequestError
from pagemill.params import PoolingParams, RequestOutput
from pagemill.server.body import unless_gone
from pagemill.server.context import ServerContext, json_response
from pagemill.server.generation import Usage, response_id
from pagemill.server.offload import off_loop
from pagemill.server.pooling_schema import ClassifyRequest, EmbeddingRequest, PoolingRequest, PoolRequest
from pagemill.server.protocol import answer_headers

__all__ = ["classify", "create_embedding", "create_pooling", "pool"]

VALUES_A_TURN = 1 << 16
"""Numbers encoded before others get a turn (a few milliseconds)."""


async def create_embedding(context: ServerContext, request: Request) -> Response:
    """A vector for each input."""
    asked = await context.read(request, EmbeddingRequest)
    context.check_model(asked.model)
    asked.params.verify()
    pooling = check_embeds(context.engine.pooling, asked.params, context.engine.embedding_size)
    request_id = response_id("embd", asked.request_id)
    outputs = await _pooled(context, request, asked, request_id)
    vectors = (embedding(output, pooling, asked.params) for output in outputs)
    return await _answer(context, asked, request_id, outputs, vectors, ("embedding", "embedding"))


async def create_pooling(context: ServerContext, request: Request) -> Response:
    """What the model makes of each input: a vector, or a classifier's outputs."""
    asked = await context.read(request, PoolRequest)
    context.check_model(asked.model)
    asked.params.verify()
    pooling = check_pools(context.engine.pooling)
    if asked.task == "classify":
        check_classifies(pooling)
    elif asked.task == "embed" or asked.dimensions is not None or not pooling.num_scores:
        check_embeds(pooling, asked.params, context.engine.embedding_size)
    request_id = response_id("pool", asked.request_id)
    outputs = await _pooled(context, request, asked, request_id)
    activate = asked.use_activation is not False
    vectors = (
        class_scores(output, pooling, activate=activate)
        if pooling.num_scores
        else embedding(output, pooling, asked.params)
        for output in outputs
    )
    return await _answer(context, asked, request_id, outputs, vectors, ("pooling", "data"))


async def classify(context: ServerContext, request: Request) -> Response:
    """The most probable class of each input, and every class's probability."""
    asked = await context.read(request, ClassifyRequest)
    context.check_model(asked.model)
    pooling = check_classifies(context.engine.pooling)
    request_id = response_id("classify", asked.request_id)
    outputs = await _pooled(context, request, asked, request_id)
    data = []
    for index, output in enumerate(outputs):
        scores = class_scores(output, pooling, activate=asked.use_activation is not False)
        label = pooling.labels[int(scores.argmax())] if pooling.labels else None
        data.append({"index": index, "label": label, "probs": scores.tolist(), "num_classes": len(scores)})
    answer = _head(context, request_id) | {"data": data, "usage": usage_of(outputs)}
    return json_response(answer, answer_headers(request_id, asked))


async def _pooled(
    context: ServerContext, request: Request, asked: EmbeddingRequest | ClassifyRequest, request_id: str
) -> list[RequestOutput]:
    """What the engine makes of each input."""
    params = PoolingParams(truncate_prompt_tokens=asked.truncate_prompt_tokens)
    given = _inputs(asked, context.admission.limit)
    texts = PoolingTexts(context.engine.tokenizer, context.engine.max_model_len)
    add_special = asked.add_special_tokens is not False
    chars = sum(len(each) for each in given if isinstance(each, str))
    prompts = await off_loop(chars, lambda: texts.inputs(given, params, add_special_tokens=add_special))
    return await unless_gone(request.receive, pool(context, prompts, request_id, asked))


def _head(context: ServerContext, request_id: str) -> dict[str, Any]:
    return {"id": request_id, "object": "list", "created": int(time.time()), "model": context.model_name}


async def _answer(
    context: ServerContext,
    asked: EmbeddingRequest,
    request_id: str,
    outputs: Sequence[RequestOutput],
    vectors: Iterable[Vector],
    names: tuple[str, str],
) -> Response:
    """A list of vectors; ``names`` of an item's object and of its values."""
    pieces, values = [], 0
    for index, vector in enumerate(vectors):
        shown: Any = vector.tolist()
        if asked.encoding_format == "base64":
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        pieces.append(msgspec.json.encode({"object": names[0], "index": index, names[1]: shown}))
        values += len(vector)
        if values > VALUES_A_TURN:
            values = 0
            await asyncio.sleep(0)
    head = msgspec.json.encode(_head(context, request_id) | {"usage": usage_of(outputs)})
    body = head[:-1] + b',"data":[' + b",".join(pieces) + b"]}"
    return Response(body, headers=answer_headers(request_id, asked), media_type="application/json")


def _inputs(asked: EmbeddingRequest | ClassifyRequest, limit: int) -> list[str | Sequence[int]]:
    """One entry per input."""
    given = asked.input
    if not given:
        raise RequestError("the input is empty; send at least one character or token id", param="input")
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    if len(given) > limit:
        raise RequestError(
            f"input has {len(given)} entries; the limit is {limit} (the server's --max-num-queued-reqs)", param="input"
        )
    return list(given)


async def pool(
    context: ServerContext, prompts: Sequence[PoolingPrompt], request_id: str, asked: PoolingRequest
) -> list[RequestOutput]:
    """The vectors of a request's inputs, side by side, within the bound on open sequences."""
    context.admission.enter(len(prompts))
    try:
        return await context.engine.pool(prompts, request_id, priority=asked.priority or 0, cache_salt=asked.cache_salt)
    finally:
        context.admission.leave(len(prompts))


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage object."""
    usage = Usage()
    for index, output in enumerate(outputs):
        usage.see(index, output)
    return usage.as_dict()
