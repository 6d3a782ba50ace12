"""Every error as OpenAI writes it: ``{"error": {"message", "type", "param", "code"}}``.

Owns the mapping from exceptions to statuses, types and codes. Must not show a traceback or a prompt to a caller.
"""

from __future__ import annotations

import math

import msgspec
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

__all__ = ["error_body", "error_response", "problem_response"]

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
