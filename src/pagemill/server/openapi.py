"""The OpenAPI document: what FastAPI cannot see, because handlers read bodies and write answers themselves.

Owns the schemas of bodies, answers, stream events, parameters and errors. Must not know handlers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from pagemill.server.answer_schemas import ChatCompletionChunk, CompletionChunk, ErrorResponse
from pagemill.server.responses_api.schemas import ResponseEvent

__all__ = ["STREAMED", "described", "document"]

STREAMED: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionChunk,
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/responses": ResponseEvent,
    "/v1/responses/{response_id}": ResponseEvent,
}
"""Routes that can answer with events, and what the data of one is."""
PROBLEMS = {
    400: "The request is wrong: `param` names the field, `message` the value, the limit and the fix.",
    401: "The API key is missing or wrong.",
    403: "Another site's page may not do this.",
    404: "There is no such model, or nothing under this id.",
    413: "The body is longer than `--max-body-bytes`.",
    429: "As much is waiting as may; `Retry-After` says when to come back.",
    500: "The engine failed on this request.",
    503: "The engine is starting again, or the server is shutting down; try again.",
    504: "The request took longer than it may.",
}
FOR_ALL = (401, 500, 503)
PARAMETERS: dict[str, dict[str, tuple[str, str, Any]]] = {
    "/v1/responses/{response_id}": {
        "stream": ("boolean", "Stream the events of a response made with background and stream.", False),
        "starting_after": ("integer", "Only events after this number.", None),
    },
    "/v1/responses/{response_id}/input_items": {
        "limit": ("integer", "1 to 100.", 20),
        "order": ("string", "asc or desc.", "desc"),
        "after": ("string", "Only items after this one.", None),
    },
}
"""Query parameters of GET, by route: type, meaning, default."""


def described(
    method: str, path: str, asked: type[BaseModel] | None, answered: type[BaseModel] | None
) -> dict[str, Any]:
    """What ``FastAPI.add_api_route`` is told of a route besides its handler."""
    extra: dict[str, Any] = {"parameters": _parameters(method, path)}
    if asked is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(asked)}}}
    ok: dict[str, Any] = {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    if answered is not None:
        ok["content"] = {"application/json": {"schema": _reference(answered)}}
    chunk = STREAMED.get(path) if method in ("POST", "GET") else None
    if chunk is not None:
        ok["content"]["text/event-stream"] = {"schema": _reference(chunk)}
    responses: dict[int | str, dict[str, Any]] = {200: ok}
    content = {"application/json": {"schema": _reference(ErrorResponse)}}
    for status in _problems(method, path, asked):
        responses[status] = {"description": PROBLEMS[status], "content": content}
    return {"methods": [method], "openapi_extra": extra, "responses": responses}


def _problems(method: str, path: str, asked: type[BaseModel] | None) -> Iterable[int]:
    if asked is not None:
        return PROBLEMS
    statuses = {*FOR_ALL}
    if method != "GET":
        statuses |= {403}
    if "{" in path:
        statuses |= {400, 404}
    return sorted(statuses)


def _parameters(method: str, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for part in path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}").partition(":")[0]
            found.append({"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    for name, (kind, meaning, default) in PARAMETERS.get(path, {}).items() if method == "GET" else ():
        schema = {"type": kind} | ({} if default is None else {"default": default})
        found.append({"name": name, "in": "query", "required": False, "description": meaning, "schema": schema})
    return found


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def document(app: FastAPI, asked: Iterable[type[BaseModel]], answered: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """The whole document, made once."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        modes: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(each, "validation"): None for each in asked}
        shown: list[type[BaseModel]] = [*answered, *STREAMED.values(), ErrorResponse]
        modes |= {(each, "serialization"): None for each in shown}
        _, definitions = models_json_schema(list(modes), ref_template="#/components/schemas/{model}")
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
