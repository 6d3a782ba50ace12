"""What a caller wants the output to look like, as one llguidance grammar, checked; in a process of its own.

Owns the translation of every form and the check, and the child's side of that process: a grammar that takes more than
its share of processor time, or of memory, or that brings the library down, ends the child and nothing else. The time
is the child's own, so how busy the machine is makes no difference. Must not know tokens: the engine builds the matcher
from the text made here, under the same :func:`limits`.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any

import msgspec

from pagemill.engine.json_schemas import closed
from pagemill.engine.lark import after_thought, tagged_text

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

__all__ = [
    "COMPILE_LIMIT_S",
    "MASK_LIMIT_S",
    "WHITESPACE",
    "Answer",
    "Options",
    "Order",
    "limits",
    "main",
    "one_line",
    "read_frame",
    "told",
    "write_frame",
]

COMPILE_LIMIT_S = 1.0
"""Processor time of one grammar's check."""
MASK_LIMIT_S = 0.2
"""Of its first step, which holds everybody up: long forced texts, like a{1000000}, are worked out there."""
MEMORY_BYTES = 2 << 30
"""Address space of the child."""
STEP_MAX_ITEMS = 10_000
"""Parser items of one mask, a fifth of llguidance's default: an ambiguous grammar holds a step up by 0.1 s, not 0.4."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
"""Between two tokens of JSON, unless told otherwise; small models would go on with blanks for ever."""
_LENGTH = struct.Struct("<Q")


class Options(msgspec.Struct, frozen=True):
    """How a form is meant, beside its text."""

    compact: bool
    lenient: bool
    thought: tuple[str, str] | None
    whitespace: str = WHITESPACE

    def of_json(self) -> dict[str, bool | str]:
        """llguidance's options of a JSON schema."""
        options: dict[str, bool | str] = {
            "whitespace_flexible": not self.compact,
            "lenient": self.lenient,
            "coerce_one_of": self.lenient,
        }
        return options if self.compact else options | {"whitespace_pattern": self.whitespace}

    def guided(self, schema: Any) -> Any:
        """A schema within another grammar: it carries its options itself."""
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object")
        return closed(schema) | {"x-guidance": self.of_json()}


class Order(msgspec.Struct):
    """Front -> child: a form to translate and check."""

    form: str
    text: str
    options: Options


class Answer(msgspec.Struct):
    """Child -> front: the grammar, or why there is none."""

    grammar: str = ""
    error: str | None = None


def limits() -> LLParserLimits:
    """What a grammar may cost, counted in llguidance's own units; the defaults bound its size and its lexer."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_max_items=STEP_MAX_ITEMS)


def checked(order: Order) -> Answer:
    """The grammar for an order."""
    from llguidance import LLMatcher

    try:
        grammar = _translated(order.form, order.text, order.options)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
        problem = None if failed else _try_out(grammar)
    except Exception as error:  # noqa: BLE001
        return Answer(error=one_line(error))
    except BaseException:  # noqa: BLE001  (a panic of the Rust library, whose words are for its authors)
        return Answer(error="llguidance fails on it; check its keywords, and write it otherwise")
    if failed:
        return Answer(error=one_line(messages[0]))
    return Answer(grammar) if problem is None else Answer(error=problem)


def _try_out(grammar: str) -> str | None:
    """What the engine does with it first, here where it may take too long or bring the library down; what is wrong.

    Over a vocabulary of bytes, so that it shows nothing of a grammar that names the model's own tokens.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits())
    begins = not matcher.is_error()
    signal.setitimer(signal.ITIMER_PROF, MASK_LIMIT_S)
    matcher.compute_bitmask()
    matcher.compute_ff_tokens()
    if begins and matcher.get_error().startswith(_DEAD_END):
        return "no text fits it; write it so that at least one does"
    return None


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def main() -> None:
    """The child: answer orders from standard input until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when all ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        frame = read_frame(sys.stdin.buffer)
        if frame is None:
            return
        order = msgspec.msgpack.decode(frame, type=Order)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_LIMIT_S)  # its signal ends the process, whatever runs
        answer = checked(order)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer))


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next message, None where the other side is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    frame = pipe.read(size)
    return frame if len(frame) == size else None


def write_frame(pipe: IO[bytes], frame: bytes) -> None:
    """Send one message."""
    pipe.write(_LENGTH.pack(len(frame)) + frame)
    pipe.flush()


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


def _translated(form: str, text: str, options: Options) -> str:
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


_DEAD_END = "NoExtensionBias"


def told(error: str) -> str:
    """What llguidance says of a matcher that stopped, without the state that it dumps behind it."""
    if error.startswith(_DEAD_END):
        return "nothing can follow what was written so far; write it so that every beginning has an end"
    return one_line(error.split("\n<state>", 1)[0])


def one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:400] + "…"
