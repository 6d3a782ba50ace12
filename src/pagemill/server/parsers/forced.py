"""Calls that a grammar has forced: the whole output is JSON, so arguments are given as they come.

Must not be used where no grammar holds: nothing here falls back to content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pagemill.server.parsers.deltas import Arguments, CallStart, Delta
from pagemill.server.parsers.json_calls import ObjectScanner

__all__ = ["NamedCall", "RequiredCalls"]

NAME = re.compile(r'"name"[ \t\r\n]*:[ \t\r\n]*"([^"]*)"')


class NamedCall:
    """The output is the arguments of one known function."""

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        self._name = name
        self._new_id = new_id
        self._begun = False

    def feed(self, text: str) -> list[Delta]:
        """The name once, then the text as it is."""
        if self._begun:
            return [Arguments(0, text)]
        text = text.lstrip()
        if not text:
            return []
        self._begun = True
        return [CallStart(0, self._new_id(), self._name), Arguments(0, text)]

    def finish(self) -> list[Delta]:
        """Nothing is ever held back."""
        return []


class RequiredCalls:
    """The output is ``[{"name": ..., "arguments": {...}}, ...]``, keys in this order."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._head = ""
        """Read since the last arguments; the name is in it."""
        self._scanner: ObjectScanner | None = None
        """Within arguments."""
        self._index = -1

    def feed(self, text: str) -> list[Delta]:
        """Names as soon as their arguments begin, then these piece by piece."""
        out: list[Delta] = []
        at = 0
        while at < len(text):
            if self._scanner is None:
                at = self._between(text, at, out)
                continue
            upto, ended = self._scanner.scan(text, at)
            upto = max(upto, at + 1)
            out.append(Arguments(self._index, text[at:upto]))
            at = upto
            if ended:
                self._scanner = None
        return out

    def _between(self, text: str, at: int, out: list[Delta]) -> int:
        """Up to the object of the next arguments: the second brace."""
        found = text.find("{", at)
        if found < 0:
            self._head += text[at:]
            return len(text)
        self._head += text[at:found]
        name = NAME.search(self._head)
        if name is None:
            self._head = ""
            return found + 1
        self._index += 1
        out.append(CallStart(self._index, self._new_id(), name[1]))
        self._head = ""
        self._scanner = ObjectScanner()
        return found

    def finish(self) -> list[Delta]:
        """A call whose arguments have not begun is none."""
        return []
