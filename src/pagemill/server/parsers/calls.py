"""The machine that finds tool calls in a text, for every format.

Each character is read once, in whatever pieces it comes: no search ever goes back over what was read, so time is linear
in the text, also in one made to hurt. A call is given when it is complete and right, never in part; text that turns out
to be no call is content, to the last character. Only blanks next to calls are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from pagemill.server.parsers.deltas import Arguments, CallStart, Delta, Text
from pagemill.server.parsers.formats import ToolFormat
from pagemill.server.parsers.json_calls import ObjectScanner, read_arguments, read_call

__all__ = ["CallParser"]

SLICE = 4096
"""Characters looked at together; bounds what going back to a held beginning copies."""
MAX_NAME = 256
BLANKS = " \t\r\n"
HEADER = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?[ \t\r\n]*")
HEADER_CHARS = re.compile(r"[\w.\-\[\] \t\r\n]")


class CallParser:
    """States: ``_start`` (may a bare call follow?), ``_prose``, ``_opened`` (after a marker), ``_header`` (a name ahead
    of its arguments), ``_object``, ``_after`` (a call ended). Each takes from ``_text`` at ``_at`` and sets the next.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._opener = re.compile("|".join(map(re.escape, form.openers))) if form.openers else None
        self._state: Callable[[], None] = self._start if form.bare else self._prose
        self._marked = not form.bare
        self._text, self._at = "", 0
        self._held: list[str] = []
        """Read and not yet settled."""
        self._blanks: list[str] = []
        """Blanks that content may still follow."""
        self._object_at = 0
        """Where in ``_held`` the object begins."""
        self._name: str | None = None
        self._scanner = ObjectScanner()
        self._in_list = False
        self._closer_at = 0
        self._header_length = 0
        self._after_call = False
        self._calls = 0
        self._out: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """What the next piece settles."""
        for begin in range(0, len(text), SLICE):
            self._text = self._text[self._at :] + text[begin : begin + SLICE]
            self._at = 0
            while self._at < len(self._text):
                before = self._state, self._at, len(self._text)
                self._state()
                if (self._state, self._at, len(self._text)) == before:
                    break  # the beginning of a marker, perhaps
        return self._taken()

    def finish(self) -> list[Delta]:
        """What was held back: half a call is content."""
        self._give("".join(self._held) + self._text[self._at :])
        self._held, self._text, self._at = [], "", 0
        if not self._after_call:
            self._flush_blanks()
        return self._taken()

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _give(self, text: str) -> None:
        """Content, its last blanks kept back."""
        solid = text.rstrip(BLANKS)
        if solid:
            self._flush_blanks()
            self._out.append(Text(solid))
            self._after_call = False
        if len(solid) < len(text):
            self._blanks.append(text[len(solid) :])

    def _flush_blanks(self) -> None:
        if self._blanks:
            self._out.append(Text("".join(self._blanks)))
            self._blanks = []

    def _hold(self, upto: int) -> None:
        self._held.append(self._text[self._at : upto])
        self._at = upto

    def _release(self) -> None:
        """What is held is no call."""
        self._give("".join(self._held))
        self._held = []
        self._in_list = False
        self._state = self._prose

    def _start(self) -> None:
        char = self._text[self._at]
        if char in BLANKS:
            self._hold(self._at + 1)
        elif char in "{[":
            self._state = self._opened
        else:
            self._release()

    def _prose(self) -> None:
        text, at = self._text, self._at
        found = self._opener.search(text, at) if self._opener else None
        if found:
            self._give(text[at : found.start()])
            self._at = found.start()
            self._hold(found.end())
            self._marked = True
            self._state = self._opened
            return
        keep = max((_overlap(text, at, opener) for opener in self._form.openers), default=0)
        self._give(text[at : len(text) - keep])
        self._at = len(text) - keep

    def _opened(self) -> None:
        char = self._text[self._at]
        if char in BLANKS:
            self._hold(self._at + 1)
        elif char == "[" and not self._in_list:
            self._in_list = True
            self._hold(self._at + 1)
        elif char == "{":
            self._begin_object(None)
        elif self._form.leading_name and not self._in_list and (char.isalnum() or char == "_"):
            self._header_length = 0
            self._object_at = len(self._held)
            self._state = self._header
        else:
            self._release()

    def _header(self) -> None:
        char = self._text[self._at]
        if char == "{":
            match = HEADER.fullmatch("".join(self._held[self._object_at :]))
            if match:
                self._begin_object(match[1])
                return
            self._release()
        elif HEADER_CHARS.match(char) and self._header_length < MAX_NAME:
            self._header_length += 1
            self._hold(self._at + 1)
        else:
            self._release()

    def _begin_object(self, name: str | None) -> None:
        self._name = name
        self._object_at = len(self._held)
        self._scanner = ObjectScanner()
        self._state = self._object

    def _object(self) -> None:
        upto, ended = self._scanner.scan(self._text, self._at)
        self._hold(upto)
        if ended is None:
            return
        source = "".join(self._held[self._object_at :]) if ended else ""
        if self._name is None:
            call = read_call(source)
        else:
            arguments = read_arguments(source)
            call = None if arguments is None else (self._name, arguments)
        if call is None or not (self._marked or call[0] in self._names):
            self._release()
            return
        index, self._calls = self._calls, self._calls + 1
        self._out += [CallStart(index, self._form.new_id(), call[0]), Arguments(index, call[1])]
        self._held, self._blanks = [], []
        self._after_call = True
        self._closer_at = 0
        self._state = self._after

    def _after(self) -> None:
        char = self._text[self._at]
        closer = self._form.closer
        if closer and char == closer[self._closer_at]:
            self._closer_at += 1
            self._hold(self._at + 1)
            if self._closer_at == len(closer):
                self._held = []
                self._in_list = False
                self._state = self._prose
        elif self._closer_at:
            self._back_to_prose()
        elif char in BLANKS:
            self._hold(self._at + 1)
        elif self._in_list and char == "]":
            self._at += 1
            self._held = []
            self._in_list = False
        elif char == ("," if self._in_list else self._form.separator):
            self._hold(self._at + 1)
            self._state = self._opened
        elif char == "{" and not self._in_list:
            self._begin_object(None)
        else:
            self._back_to_prose()

    def _back_to_prose(self) -> None:
        """Read what follows a call again as prose: a marker may begin in it."""
        self._text = "".join(self._held) + self._text[self._at :]
        self._at = 0
        self._held = []
        self._in_list = False
        self._state = self._prose


def _overlap(text: str, at: int, marker: str) -> int:
    """How many of the last characters of ``text[at:]`` may be the beginning of ``marker``."""
    for size in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if marker.startswith(text[len(text) - size :]):
            return size
    return 0
