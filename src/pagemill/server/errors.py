"""Every error as OpenAI writes it: ``{"error": {"message", "type", "param", "code"}}``.

Owns the mapping from exceptions to statuses, types and codes, and the one place that validation errors of the HTTP
schema become one line. Must not show a traceback or a prompt to a caller.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from pagemill.errors import (
    EngineDeadError,
    ModelNotFoundError,
    NotFoundError,
    PagemillError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    ShuttingDownError,
)

__all__ = ["error_body", "error_response", "from_validation", "problem_response"]

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
CODES: dict[type[PagemillError], str] = {
    ModelNotFoundError: "model_not_found",
    NotFoundError: "not_found",
    PromptTooLongError: "context_length_exceeded",
    QueueFullError: "rate_limit_exceeded",
}
MAX_TOLD = 1000
"""With more faults than this nobody is helped by the first, and finding it takes long."""
SHOWN_CHARS = 80
"""Of a wrong value, at most this much is repeated back."""


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON body; ``code`` is a word of OpenAI's, or null where there is none."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def problem_body(error: BaseException) -> bytes:
    """The JSON body for an exception; what is not Pagemill's own says nothing of its inside."""
    if not isinstance(error, PagemillError):
        return error_body(500, "internal error; the server's log has the details")
    code = next((word for kind, word in CODES.items() if isinstance(error, kind)), None)
    param = error.param if isinstance(error, RequestError) else None
    if isinstance(error, ModelNotFoundError):
        param = "model"
    return error_body(error.status, str(error), param=param, code=code)


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error that no exception stands for."""
    body = error_body(status, message, param=param, code=code)
    return Response(body, status, headers=headers, media_type="application/json")


def problem_response(error: BaseException) -> Response:
    """The response for an exception, with Retry-After where trying again may help."""
    status = error.status if isinstance(error, PagemillError) else 500
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, EngineDeadError | ShuttingDownError):
        headers["retry-after"] = "1"
    return Response(problem_body(error), status, headers=headers, media_type="application/json")


_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


_PLURALS = {"str": "strings", "int": "integers", "constrained-int": "integers", "float": "numbers"}
_NOUNS = {"String": "a string", "List": "a list", "Dictionary": "an object", "Value": "a value"}
_SENTENCE = re.compile(
    rf"({'|'.join(_NOUNS)}) should (have|match pattern) (.*?)(?: after validation, not .*)?", re.DOTALL
)


def from_validation(error: ValidationError) -> RequestError:
    """The first thing that is wrong, in one line: where, the value, what it must be."""
    if error.error_count() > MAX_TOLD:
        return RequestError(f"the body does not fit the schema, in {error.error_count()} places")
    details = error.errors(include_url=False, include_context=True)
    first = details[0]
    kind = first["type"]
    if kind == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['ctx']['error']}")
    path = [part for part in first["loc"] if not _is_branch(part)]
    where = ".".join(str(part) for part in path)
    if not path:
        return RequestError("the body must be a JSON object")
    if kind == "missing":
        return RequestError(f"{where} is missing; it is required", param=where)
    return RequestError(f"{where}={_shown(first['input'])} is not valid; it must be {_wanted(details)}", param=where)


def _is_branch(part: str | int) -> bool:
    """Pydantic names the tried member of a union in the path ("list[int]"); a caller knows nothing of it."""
    return isinstance(part, str) and (part in {"str", "int", "float", "bool"} or "[" in part or part[:1].isupper())


def _wanted(details: list[Any]) -> str:
    """What would have been right; several members of a union are joined."""
    options: list[str] = []
    for detail in details:
        if detail["loc"][:1] != details[0]["loc"][:1]:
            continue
        text = _list_wanted(detail) or _EXPECTED.get(detail["type"]) or _as_noun(detail["msg"])
        if text not in options:
            options.append(text)
    return " or ".join(options[:4])


def _list_wanted(detail: Any) -> str | None:
    """The list that a member of a union is, and how its entries are bounded; None where it is none."""
    branch = next((part for part in detail["loc"] if isinstance(part, str) and part.startswith("list[")), None)
    kind = "" if branch is None else branch
    depth = 0
    while kind.startswith("list["):
        kind, depth = kind[len("list[") : -1], depth + 1
    if not depth or kind not in _PLURALS:
        return None
    limit = {"greater_than_equal": ("ge", "least"), "less_than_equal": ("le", "most")}.get(detail["type"])
    bound = f" of at {limit[1]} {detail['ctx'][limit[0]]}" if limit else ""
    return f"a list of {'lists of ' * (depth - 1)}{_PLURALS[kind]}{bound}"


def _as_noun(message: str) -> str:
    """Pydantic's sentence about a value, to stand after "it must be"."""
    found = _SENTENCE.fullmatch(message)
    if found is None:
        return message.removeprefix("Input should be ")
    return f"{_NOUNS[found[1]]} {'with' if found[2] == 'have' else 'that matches the pattern'} {found[3]}"


def _shown(value: Any) -> str:
    """A value as JSON, cut; a number that JSON cannot say as Infinity or NaN."""
    try:
        lacks_json = isinstance(value, float) and not math.isfinite(value)
        text = json.dumps(value) if lacks_json else msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        text = type(value).__name__
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
