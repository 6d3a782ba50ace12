"""POST /v1/embeddings.

Owns how inputs are read and how vectors are written. Vectors are encoded one after another, and the event loop gets its
turn between them: an answer may hold millions of numbers.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagemill.engine.pooling import PoolingPrompt, PoolingTexts, check_embeds, embedding
from pagemill.errors import RequestError
from pagemill.params import RequestOutput
from pagemill.server.body import unless_gone
from pagemill.server.context import ServerContext
from pagemill.server.generation import Usage, response_id
from pagemill.server.offload import off_loop
from pagemill.server.pooling_schema import EmbeddingRequest, PoolingRequest
from pagemill.server.protocol import answer_headers

__all__ = ["create_embedding", "pool"]

VALUES_A_TURN = 1 << 16
"""Numbers encoded before others get a turn (a few milliseconds)."""


async def create_embedding(context: ServerContext, request: Request) -> Response:
    """A vector for each input."""
    asked = await context.read(request, EmbeddingRequest)
    context.check_model(asked.model)
    params = asked.params
    params.verify()
    pooling = check_embeds(context.engine.pooling, params, context.engine.embedding_size)
    given = _inputs(asked, context.admission.limit)
    texts = PoolingTexts(context.engine.tokenizer, context.engine.max_model_len)
    add_special = asked.add_special_tokens is not False
    chars = sum(len(each) for each in given if isinstance(each, str))
    prompts = await off_loop(chars, lambda: texts.inputs(given, params, add_special_tokens=add_special))
    request_id = response_id("embd", asked.request_id)
    outputs = await unless_gone(request.receive, pool(context, prompts, request_id, asked))
    head = {"id": request_id, "object": "list", "created": int(time.time()), "model": context.model_name}
    pieces, values = [], 0
    for index, output in enumerate(outputs):
        vector = embedding(output, pooling, params)
        shown: Any = vector.tolist()
        if asked.encoding_format == "base64":
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        pieces.append(msgspec.json.encode({"object": "embedding", "index": index, "embedding": shown}))
        values += len(vector)
        if values > VALUES_A_TURN:
            values = 0
            await asyncio.sleep(0)
    body = msgspec.json.encode({**head, "usage": usage_of(outputs)})[:-1] + b',"data":[' + b",".join(pieces) + b"]}"
    return Response(body, headers=answer_headers(request_id, asked), media_type="application/json")


def _inputs(asked: EmbeddingRequest, limit: int) -> list[str | Sequence[int]]:
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
