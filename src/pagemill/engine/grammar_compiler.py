"""The front's half of structured output: what a caller wrote becomes one llguidance grammar, checked within bounds.

Owns the forms that are understood (JSON schema, regular expression, choice, grammar), their limits in size and time,
and the errors that name what cannot be enforced. Must not know tokens: the engine's half (grammars.py) builds the
matcher from the text made here. Whatever is accepted here is enforced; nothing of a schema is passed over in silence,
unless ``lenient`` asks for that.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from pagemill.engine.json_schemas import closed
from pagemill.engine.lark import after_thought, tagged_text
from pagemill.errors import RequestError
from pagemill.params import StructuredOutputsParams

__all__ = ["COMPILE_LIMIT_S", "compile_grammar", "in_background"]

COMPILE_LIMIT_S = 1.0
MAX_CHARS = 256 * 1024
"""Longest schema, expression, choice list or grammar."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
"""Between two tokens of JSON; small models would go on with blanks for ever."""
MAX_COMPILING = 4
"""Compilations at once."""

T = TypeVar("T")

_slots = threading.BoundedSemaphore(MAX_COMPILING)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (a panic of the Rust library is no Exception)
            future.set_exception(error if isinstance(error, Exception) else RequestError(_line(error)))

    threading.Thread(target=run, name="pagemill-grammar", daemon=True).start()
    return future


@dataclass(frozen=True)
class _Options:
    """How a form is meant, beside its text."""

    compact: bool
    lenient: bool
    thought: tuple[str, str] | None

    def of_json(self) -> dict[str, bool | str]:
        """llguidance's options of a JSON schema."""
        options: dict[str, bool | str] = {
            "whitespace_flexible": not self.compact,
            "lenient": self.lenient,
            "coerce_one_of": self.lenient,
        }
        return options if self.compact else options | {"whitespace_pattern": WHITESPACE}

    def guided(self, schema: Any) -> Any:
        """A schema within another grammar: it carries its options itself."""
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object")
        return closed(schema) | {"x-guidance": self.of_json()}


def _tags(value: Any) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """vLLM's structural tag, its parts checked."""
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("it needs a list of structures and a list of triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("a trigger is a string that is not empty")
    tags = []
    for each in structures:
        if not isinstance(each, dict) or not all(isinstance(each.get(name), str) for name in ("begin", "end")):
            raise ValueError("a structure has begin, schema and end")
        if not any(each["begin"].startswith(trigger) for trigger in triggers):
            raise ValueError(f"{each['begin'][:40]!r} begins with none of the triggers")
        tags.append((each["begin"], each.get("schema", {}), each["end"]))
    return tags, triggers


def compile_grammar(asked: StructuredOutputsParams) -> str:
    """The llguidance grammar for a verified ``asked``; RequestError names what is wrong. Blocks up to the limit."""
    form, text = _form(asked)
    if len(text) > MAX_CHARS:
        raise RequestError(
            f"structured_outputs: the {form} has {len(text)} characters; at most {MAX_CHARS} are taken",
            param="structured_outputs",
        )
    return _compiled(form, text, _Options(asked.disable_any_whitespace, asked.lenient, asked.thought))


@lru_cache(maxsize=256)
def _compiled(form: str, text: str, options: _Options) -> str:
    if not _slots.acquire(timeout=COMPILE_LIMIT_S):
        raise RequestError(
            f"{MAX_COMPILING} grammars are being compiled; try again in a moment", param="structured_outputs"
        )
    future = in_background(lambda: _checked(form, text, options))
    future.add_done_callback(lambda _: _slots.release())
    try:
        return future.result(COMPILE_LIMIT_S)
    except TimeoutError:
        raise RequestError(
            f"structured_outputs: the {form} took more than {COMPILE_LIMIT_S:g} s to compile; make it simpler",
            param="structured_outputs",
        ) from None


def _form(asked: StructuredOutputsParams) -> tuple[str, str]:
    """Kind and text of the one form that is given."""
    if asked.json_object:
        return "JSON schema", '{"type":"object"}'
    if asked.json is not None:
        try:
            return "JSON schema", asked.json if isinstance(asked.json, str) else json.dumps(asked.json)
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"the JSON schema is no JSON: {_line(error)}", param="structured_outputs") from None
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


def _checked(form: str, text: str, options: _Options) -> str:
    from llguidance import LLMatcher  # only who asks for a grammar pays for the import

    try:
        grammar = _translated(form, text, options)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    except (ValueError, RecursionError) as error:
        failed, messages, grammar = True, [_line(error)], ""
    if failed:
        raise RequestError(
            f"structured_outputs: the {form} cannot be enforced: {_line(messages[0])}", param="structured_outputs"
        )
    return grammar


def _translated(form: str, text: str, options: _Options) -> str:
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    if form == "JSON schema":
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object")
        if options.thought is None:
            return LLMatcher.grammar_from_json_schema(closed(schema), overrides=options.of_json())  # type: ignore[arg-type]
        return LLMatcher.grammar_from_lark(after_thought(options.guided(schema), options.thought))
    if form == "structural tag":
        tags, triggers = _tags(json.loads(text))
        guided = [(begin, options.guided(schema), end) for begin, schema, end in tags]
        return LLMatcher.grammar_from_lark(tagged_text(guided, triggers, options.thought))
    if form == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, json.loads(text))))
    if form == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, use_ascii='d')}/")
    return grammar_from("grammar" if form == "grammar" else "llguidance", text)


def _escaped(text: str) -> str:
    """A literal within a regular expression."""
    return "".join("\\" + character if character in _SPECIAL else character for character in text)


_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")


def _line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:400] + "…"
