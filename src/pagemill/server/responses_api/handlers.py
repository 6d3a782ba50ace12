"""The routes under /v1/responses.

Owns who may see which response, what runs on without its client, and how conversations go on from stored responses.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.engine.caller import CALLER
from pagemill.errors import NotFoundError, RequestError
from pagemill.server.body import go_on_without_client, unless_gone
from pagemill.server.chat import PreparedChat, prepare_chat
from pagemill.server.context import ServerContext, json_response
from pagemill.server.protocol import answer_headers
from pagemill.server.responses_api.items import Item, check_size, read_input, to_messages
from pagemill.server.responses_api.request import EXTENSIONS, ResponsesRequest, renamed_errors
from pagemill.server.responses_api.run import ResponseRun, response_object
from pagemill.server.responses_api.store import StoredResponse
from pagemill.server.sse import EventStream

__all__ = [
    "cancel_response",
    "count_input_tokens",
    "create_response",
    "delete_response",
    "get_response",
    "list_input_items",
]

MAX_LISTED = 100
MAX_CONVERSATION = 4096
"""Items that a response begins with, those of earlier ones included."""


async def create_response(context: ServerContext, request: Request) -> Response:
    """Answer whole, as a stream of typed events, or at once with the work going on in the background."""
    asked = await context.read(request, ResponsesRequest)
    entry, prepared = await _prepared(context, asked, CALLER.get().identity)
    run = ResponseRun(context, asked, prepared, entry.response)
    headers = answer_headers(prepared.job.request_id, asked, known=EXTENSIONS)
    if asked.background:
        context.admission.enter(1)  # refused now rather than in a moment
        context.admission.leave(1)
        entry.response["status"] = "queued"
        entry.events = [] if asked.stream else None
        context.responses.put(entry)
        entry.task = asyncio.create_task(_in_background(context, entry, run))
        if asked.stream:
            return EventStream(_followed(entry, 0), headers, done=b"")
        return json_response(entry.response, headers)
    if asked.stream:
        return EventStream(_streamed(context, entry, run, keep=asked.kept), headers, done=b"")
    with renamed_errors():
        answer = await unless_gone(request.receive, run.whole())
    if asked.kept:
        context.responses.put(entry)
    return json_response(answer, headers)


async def count_input_tokens(context: ServerContext, request: Request) -> Response:
    """How many tokens the same request to /v1/responses would begin with."""
    asked = await context.read(request, ResponsesRequest)
    _, prepared = await _prepared(context, asked, CALLER.get().identity)
    (prompt,) = prepared.job.prompts
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def get_response(context: ServerContext, request: Request) -> Response:
    """A stored response as it is now; with stream=true the events of one made in the background as a stream."""
    entry = _entry(context, request)
    if not _flag(request, "stream"):
        return json_response(entry.response)
    if entry.events is None:
        raise RequestError("only a response made with background and stream can be streamed again", param="stream")
    after = _number(request, "starting_after", -1)
    return EventStream(_followed(entry, after + 1), {}, done=b"")


async def delete_response(context: ServerContext, request: Request) -> Response:
    """Forget a response; it stops if it runs."""
    response_id = request.path_params["response_id"]
    context.responses.delete(response_id, CALLER.get().identity)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(context: ServerContext, request: Request) -> Response:
    """Stop a response that runs in the background; what it has stays. A finished one is given as it is."""
    entry = _entry(context, request)
    if entry.task is None:
        raise RequestError("only a response made with background can be cancelled; close the connection of another one")
    if not entry.finished:
        entry.task.cancel()
        await asyncio.gather(entry.task, return_exceptions=True)
        if not entry.finished:  # it had not begun
            entry.response["status"] = "cancelled"
    return json_response(entry.response)


async def list_input_items(context: ServerContext, request: Request) -> Response:
    """The items that a stored response began with, newest first unless order=asc."""
    entry = _entry(context, request)
    items = [*entry.history, *entry.input_items]
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"after={after[:80]!r} is no item of this response", param="after")
        items = items[places[0] + 1 :]
    limit = _number(request, "limit", 20)
    if not 1 <= limit <= MAX_LISTED:
        raise RequestError(f"limit={limit} is out of range; it must be between 1 and {MAX_LISTED}", param="limit")
    shown = items[:limit]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else "",
            "last_id": shown[-1]["id"] if shown else "",
            "has_more": len(items) > limit,
        }
    )


async def _prepared(
    context: ServerContext, asked: ResponsesRequest, owner: bytes
) -> tuple[StoredResponse, PreparedChat]:
    """Everything that can be wrong with a request is found here."""
    context.check_model(asked.model)
    asked.verify()
    history = [] if asked.previous_response_id is None else _history(context, asked.previous_response_id, owner)
    stored = functools.cache(lambda: context.responses.items_of(owner))
    items = read_input(asked.input, lambda item_id: stored().get(item_id))
    if len(history) + len(items) > MAX_CONVERSATION:
        raise RequestError(
            f"the conversation has {len(history) + len(items)} items; the limit is {MAX_CONVERSATION}; begin a new one",
            param="previous_response_id" if history else "input",
        )
    check_size([*history, *items])
    messages = to_messages([*history, *items], asked.instructions)
    if not messages:
        raise RequestError("input is empty; send text or at least one item", param="input")
    with renamed_errors():
        prepared = await _fitting(context, asked, messages)
    response = response_object(asked, prepared, context.model_name)
    prepared.job.request_id = response["id"]
    return StoredResponse(owner, response, items, history), prepared


def _history(context: ServerContext, response_id: str, owner: bytes) -> list[Item]:
    try:
        previous = context.responses.get(response_id, owner)
    except NotFoundError as error:
        raise RequestError(str(error), param="previous_response_id") from None
    if not previous.finished:
        raise RequestError(f"the response {response_id!r} is not finished yet; wait", param="previous_response_id")
    return previous.conversation


async def _fitting(context: ServerContext, asked: ResponsesRequest, messages: list[dict[str, Any]]) -> PreparedChat:
    """The chat, with truncation auto without its oldest messages where it would not fit."""

    async def without(count: int) -> PreparedChat:
        chat = asked.chat_request([*messages[:fixed], *messages[fixed + count :]])
        return await prepare_chat(context, chat, refuse_long=asked.truncation != "auto")

    def fits(prepared: PreparedChat) -> bool:
        (prompt,) = prepared.job.prompts
        return len(prompt.token_ids) + (asked.max_output_tokens or 1) <= context.engine.max_model_len

    fixed = 1 if messages[0]["role"] == "system" else 0
    prepared = await without(0)
    if asked.truncation != "auto" or fits(prepared):
        return prepared
    # A tool's output cannot stand without its call, and many templates want a user's message first.
    cuts = [count for count in range(1, len(messages) - fixed) if messages[fixed + count]["role"] == "user"]
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        tried = await without(cuts[middle])
        if fits(tried):
            high, prepared = middle, tried
        else:
            low = middle + 1
    return prepared


async def _streamed(
    context: ServerContext, entry: StoredResponse, run: ResponseRun, *, keep: bool
) -> AsyncGenerator[bytes, None]:
    with renamed_errors():
        async with aclosing(run.events(opened=False)) as pieces:
            async for piece in pieces:
                if keep and entry.finished:
                    context.responses.put(entry)
                yield b"".join(piece)


async def _in_background(context: ServerContext, entry: StoredResponse, run: ResponseRun) -> None:
    go_on_without_client()
    try:
        async with aclosing(run.events(opened=True)) as pieces:
            async for piece in pieces:
                if entry.events is not None:
                    entry.events += piece
                entry.tell()
    except asyncio.CancelledError:
        run.cancel()
        raise
    finally:
        context.responses.note(entry)
        entry.tell()


async def _followed(entry: StoredResponse, index: int) -> AsyncGenerator[bytes, None]:
    """The events from ``index`` on, as they come; whoever reads may go away."""
    assert entry.events is not None
    while True:
        if index < len(entry.events):
            pieces = entry.events[index:]
            index += len(pieces)
            yield b"".join(pieces)
        elif entry.finished:
            return
        else:
            await entry.changed.wait()


def _entry(context: ServerContext, request: Request) -> StoredResponse:
    return context.responses.get(request.path_params["response_id"], CALLER.get().identity)


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise RequestError(f"{name}={value[:40]!r} must be true or false", param=name)
    return value == "true"


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise RequestError(f"{name}={value[:40]!r} must be a whole number", param=name)
    return int(value)
