"""Grammars in which a JSON schema is not all: a thought before it, or free text that turns into calls.

Writes llguidance's dialect of Lark. Must not check schemas: the compiler does, with the grammar made here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["after_thought", "tagged_text"]

TEXT = r"(.|\n)*"
HEAD = "%llguidance {}\n"
BLANKS = r"BLANKS: /[ \n\r\t]{1,8}/"


def after_thought(schema: Any, thought: tuple[str, str]) -> str:
    """JSON that fits ``schema``, which text between the two marks may precede; the first mark may stand already."""
    opened, _ = thought
    start = "(thought BLANKS?)? json" if opened else "thought BLANKS? json"
    return "\n".join(
        [f"{HEAD}start: {start}", _thought(thought), f"TEXT: /{TEXT}/", BLANKS, f"json: {_json(schema)}", ""]
    )


def tagged_text(tags: Sequence[tuple[str, Any, str]], triggers: Sequence[str], thought: tuple[str, str] | None) -> str:
    """Any text; what begins with a trigger is one of the tags (begin, schema, end), which begin with a trigger each.

    Within a thought, which can only come first, triggers are text.
    """
    rules = [f"TEXT: /{TEXT}/", f"END: /{TEXT}/"]
    calls: list[str] = []
    first: list[str] = []
    for index, trigger in enumerate(triggers):
        inner = [
            f"({json.dumps(begin[len(trigger) :])} {_json(schema)} {json.dumps(end)})"
            for begin, schema, end in tags
            if begin.startswith(trigger)
        ]
        if not inner:
            continue
        rules += [f"call_{index}: {' | '.join(inner)}", f"trigger_{index}[lazy]: TEXT {json.dumps(trigger)}"]
        calls.append(f"(trigger_{index} call_{index})")
        rules.append(f"first_{index}[lazy]: FIRST {json.dumps(trigger)}")
        first.append(f"first_{index} call_{index} more")
    rules.append(f"more: ({' | '.join(calls)})* END")
    if thought is None:
        start, rules = "more", [rule for rule in rules if not rule.startswith("first_")]
    elif not thought[0]:
        start, rules = "thought more", [*(rule for rule in rules if not rule.startswith("first_")), _thought(thought)]
    else:
        start = " | ".join(["thought more", *first, "FIRST"])
        rules += [_thought(thought), f"FIRST: /{_not_beginning(thought[0])}/"]
    return "\n".join([f"{HEAD}start: {start}", *rules, ""])


def _thought(thought: tuple[str, str]) -> str:
    opening, closing = thought
    return f"thought[lazy]: {json.dumps(opening) + ' ' if opening else ''}TEXT {json.dumps(closing)}"


def _not_beginning(mark: str) -> str:
    """Text that differs from ``mark`` in one of its first two characters, or is empty."""
    one, two = (rf"\x{{{ord(character):x}}}" for character in (mark + "\n")[:2])
    return f"(([^{one}]|{one}[^{two}]){TEXT})?"


def _json(schema: Any) -> str:
    return "%json " + json.dumps(schema)
