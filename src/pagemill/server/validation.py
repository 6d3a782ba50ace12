"""What is wrong with a request's fields, in one line: the one place that pydantic's errors become Pagemill's.

Must not know HTTP: files of requests are checked by the same schema.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from pydantic import ValidationError

from pagemill.errors import RequestError

__all__ = ["from_validation"]

MAX_TOLD = 1000
"""With more faults than this nobody is helped by the first, and finding it takes long."""
SHOWN_CHARS = 80
"""Of a wrong value, at most this much is repeated back."""

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
        text = _EXPECTED.get(detail["type"]) or _in_words(detail["msg"])
        if text not in options:
            options.append(text)
    return " or ".join(options[:4])


_SHOULD = (
    (re.compile(r"Input should be "), ""),
    (re.compile(r"(List|Tuple|Set) should have (.*?)( after validation.*)?$"), r"a list of \2"),
    (re.compile(r"Dictionary should have (.*?)( after validation.*)?$"), r"an object of \1"),
    (re.compile(r"String should have (.*)"), r"a string of \1"),
    (re.compile(r"String should match (.*)"), r"a string that matches the \1"),
)
"""Pydantic's sentences, as the end of ours."""


def _in_words(message: str) -> str:
    for pattern, words in _SHOULD:
        if pattern.match(message):
            return pattern.sub(words, message)
    return message


def _shown(value: Any) -> str:
    """A value as JSON, cut."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        text = type(value).__name__
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
