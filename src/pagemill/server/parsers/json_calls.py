"""JSON objects as they come, and what a complete one says as a tool call."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["ObjectScanner", "read_arguments", "read_call"]

MAX_DEPTH = 128
IN_STRING = re.compile(r'[^"\\]*')
OUTSIDE = re.compile(r"[ \t\r\n0-9+\-.eEtrufalsn:,]*")


class ObjectScanner:
    """Finds where an object ends, each character seen once. Whether it is JSON is json.loads' business."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str, at: int) -> tuple[int, bool | None]:
        """(how far, True: the object ended there; False: JSON cannot go on there; None: it goes on)."""
        end = len(text)
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (IN_STRING if self._in_string else OUTSIDE).match(text, at)
            assert match is not None
            at = match.end()
            if at == end:
                break
            char = text[at]
            if self._in_string:
                self._escaped = char == "\\"
                self._in_string = self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[" and self._depth < MAX_DEPTH:
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1, True
            else:
                return at, False
            at += 1
        return at, None


def read_call(source: str) -> tuple[str, str] | None:
    """A complete object -> (name, arguments as JSON text), or None if it is no call."""
    call = _loads(source)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict):
        return None
    name = call.get("name")
    if not isinstance(name, str) or not name or not name.isprintable():
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    text = _dumps({} if arguments is None else arguments)
    return None if text is None else (name, text)


def read_arguments(source: str) -> str | None:
    """A complete object -> JSON text, or None if it is not JSON."""
    return _dumps(_loads(source))


def _loads(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return ""


def _dumps(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() or _encodes(text) else json.dumps(value)
    except (ValueError, RecursionError):
        return None


def _encodes(text: str) -> bool:
    """False for half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
