"""Types and ranges of request parameters: read off a struct's annotations, checked with the value and what it must be.

Owns what all parameters have in common (None, lists, wrong types, bounds). Must not know any parameter by name.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, get_args, get_origin

import msgspec

from pagemill.errors import RequestError

__all__ = ["check_float", "check_int", "check_types", "settle"]


@functools.cache
def _forms(cls: type[msgspec.Struct]) -> tuple[tuple[str, Any, tuple[type, ...], str], ...]:
    """Of each field: its name, its default, the types it may have, and their names for people."""
    found = []
    for item in msgspec.structs.fields(cls):
        whole = get_origin(item.type) in (tuple, dict)
        parts = (item.type,) if whole else get_args(item.type) or (item.type,)
        types = tuple(get_origin(part) or part for part in parts)
        default = item.default if item.default_factory is msgspec.NODEFAULT else item.default_factory()
        words = " or ".join(dict.fromkeys(map(_in_words, parts)))
        # An int will do for a number, and True is an int to Python only.
        accepted = (*types, int) if float in types else types
        found.append((item.name, default, accepted, words))
    return tuple(found)


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple[int, ...]: "a list of integers",
    tuple[str, ...]: "a list of strings",
    tuple[str, str]: "a list of two strings",
    type(None): "None",
}


def _in_words(kind: Any) -> str:
    return _WORDS.get(kind, "an object")


def settle(params: msgspec.Struct) -> None:
    """Lists become tuples where tuples are meant, and None the default where None means nothing else."""
    for name, default, types, _ in _forms(type(params)):
        value = getattr(params, name)
        if value is None and type(None) not in types:
            msgspec.structs.force_setattr(params, name, default)
        elif isinstance(value, list) and tuple in types:
            msgspec.structs.force_setattr(params, name, tuple(value))


def check_types(params: msgspec.Struct, prefix: str = "", param: str | None = None) -> None:
    for name, _, types, wanted in _forms(type(params)):
        value = getattr(params, name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise RequestError(f"{prefix}{name}={_shown(value)} must be {wanted}", param=param or name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be an integer", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name}={value} is out of range; it must be between {low} and {high}", param=name)


def check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name}={value!r} must be a number", param=name)
    below = value <= low if open_low else value < low
    if below or value > high or not abs(value) <= sys.float_info.max:  # NaN, infinities, and integers beyond
        least = f"more than {low:g}" if open_low else f"at least {low:g}"
        most = "finite" if math.isinf(high) else f"at most {high:g}"
        raise RequestError(f"{name}={value} is out of range; it must be {least} and {most}", param=name)
