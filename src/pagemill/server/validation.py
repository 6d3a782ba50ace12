"""What is wrong with a request's fields, in one line: the one place that pydantic's errors become Pagemill's.

Must not know HTTP: files of requests are checked by the same schema.
"""

from __future__ import annotations

import json
import math
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
