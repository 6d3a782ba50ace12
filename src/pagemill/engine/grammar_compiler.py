"""The front's half of structured output: what a caller wrote becomes one llguidance grammar, checked within bounds.

Owns which form is given, the limit of its length, the cache, and the processes that check (grammar_check.py), which it
starts with the first grammar and anew when one was ended. Whatever is accepted here is enforced; nothing of a schema is
passed over in silence, unless ``lenient`` asks for that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

import msgspec

from pagemill.engine.grammar_check import (
    COMPILE_LIMIT_S,
    MASK_LIMIT_S,
    WHITESPACE,
    Answer,
    Options,
    Order,
    one_line,
    read_frame,
    write_frame,
)
from pagemill.errors import QueueFullError, RequestError
from pagemill.params import StructuredOutputsParams

__all__ = ["MAX_CHARS", "compile_grammar"]

MAX_CHARS = 256 * 1024
"""Longest schema, expression, choice list or grammar."""
MAX_COMPILING = 2
"""Compilations at once."""
MAX_WAIT_S = 10.0
"""For one of them to be done."""


def compile_grammar(asked: StructuredOutputsParams) -> str:
    """The llguidance grammar for a verified ``asked``; RequestError names what is wrong. Blocks while it compiles."""
    form, text = _form(asked)
    if len(text) > MAX_CHARS:
        raise RequestError(
            f"structured_outputs: the {form} has {len(text)} characters; at most {MAX_CHARS} are taken",
            param="structured_outputs",
        )
    options = Options(
        asked.disable_any_whitespace, asked.lenient, asked.thought, asked.whitespace_pattern or WHITESPACE
    )
    try:
        order = msgspec.msgpack.encode(Order(form, text, options))
    except UnicodeEncodeError as error:
        raise RequestError(
            f"structured_outputs: the {form} is no text: {one_line(error)}", param="structured_outputs"
        ) from None
    answer = _answer(order)
    if answer.error is not None:
        raise RequestError(
            f"structured_outputs: the {form} cannot be enforced: {answer.error}", param="structured_outputs"
        )
    return answer.grammar


@lru_cache(maxsize=256)
def _answer(order: bytes) -> Answer:
    return _checkers.ask(order)


class _Checker:
    """A child that checks grammars, and the pipes to it."""

    def __init__(self) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.insert(0, {package_root!r}); from pagemill.engine.grammar_check import main; main()"
        )
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic of the library would print parts of the schema
            process_group=0,
        )

    def ask(self, order: bytes) -> Answer | None:
        """The child's answer, None where the order ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_frame(self._process.stdin, order)
        except BrokenPipeError:
            return None
        frame = read_frame(self._process.stdout)
        return None if frame is None else msgspec.msgpack.decode(frame, type=Answer)

    def close(self) -> int:
        """End the child; its exit code, negative for a signal."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return self._process.wait()


class _Checkers:
    """As many children as there were compilations at once."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_COMPILING)
        self._idle: list[_Checker] = []
        atexit.register(self.close)

    def ask(self, order: bytes) -> Answer:
        """Have an order answered; one that ends its child is too complex."""
        if not self._slots.acquire(timeout=MAX_WAIT_S):
            raise QueueFullError(f"{MAX_COMPILING} grammars are being compiled and others wait; try again in a moment")
        try:
            for _ in range(2):  # the first may have been ended from outside
                checker = self._idle.pop() if self._idle else _Checker()
                answer = checker.ask(order)
                if answer is not None:
                    self._idle.append(checker)
                    return answer
                exit_code = checker.close()
                if exit_code == -signal.SIGPROF:
                    return Answer(
                        error=f"it took more than {COMPILE_LIMIT_S:g} s of processor time to compile, or"
                        f" {MASK_LIMIT_S:g} s for a step; make it simpler"
                    )
            return Answer(error=f"it is too complex for the compiler (exit code {exit_code}); make it simpler")
        finally:
            self._slots.release()

    def close(self) -> None:
        """End the children that have nothing to do."""
        while self._idle:
            self._idle.pop().close()


_checkers = _Checkers()


def _form(asked: StructuredOutputsParams) -> tuple[str, str]:
    """Kind and text of the one form that is given."""
    if asked.json_object:
        return "JSON schema", '{"type":"object"}'
    if asked.json is not None:
        try:
            return "JSON schema", asked.json if isinstance(asked.json, str) else json.dumps(asked.json)
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"the JSON schema is no JSON: {one_line(error)}", param="structured_outputs") from None
    if asked.structural_tag is not None:
        tag = asked.structural_tag
        return "structural tag", tag if isinstance(tag, str) else json.dumps(tag)
    if asked.choice is not None:
        return "choice", json.dumps(list(asked.choice))
    for form in ("regex", "grammar", "llguidance"):
        text = getattr(asked, form)
        if text is not None:
            return form, text
    raise AssertionError("a verified StructuredOutputsParams has one form")
