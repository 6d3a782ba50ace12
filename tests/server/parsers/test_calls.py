"""Tool calls in text: every format, any cutting, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.config import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from pagemill.models.chat_template import ChatTemplate
from pagemill.server.parsers.answer import Message
from pagemill.server.parsers.calls import CallParser
from pagemill.server.parsers.deltas import Arguments, CallStart
from pagemill.server.parsers.reasoning import REASONING_FORMATS
from pagemill.server.parsers.registry import TOOL_FORMATS, Formats
from tests.server.fake_engine import ByteTokenizer

NAMES = {"f", "get_weather"}
F = '{"name": "f", "arguments": {"a": "é }{", "b": [1, {"c": null}]}}'
ARGUMENTS = {"a": "é }{", "b": [1, {"c": None}]}
G = '{"name": "get_weather", "parameters": {}}'

# format -> (text, content, calls)
WRITTEN: list[tuple[str, str, str | None, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", None, [("f", ARGUMENTS)]),
    (
        "hermes",
        f"Well:\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n",
        "Well:",
        [("f", ARGUMENTS), ("get_weather", {})],
    ),
    ("hermes", f"<tool_call>{F}<tool_call>{G}</tool_call>", None, [("f", ARGUMENTS), ("get_weather", {})]),
    ("hermes", f"<tool_call>{F}</tool_call> done.", " done.", [("f", ARGUMENTS)]),
    ("hermes", f"<tool_call> what? <tool_call>{G}", "<tool_call> what?", [("get_weather", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", []),
    ("hermes", '<tool_call>{"name": "f", "argum', "", []),
    ("hermes", '{"name": "f"}', "", []),
    ("llama3_json", F, None, [("f", ARGUMENTS)]),
    ("llama3_json", f" {F}; {G}", None, [("f", ARGUMENTS), ("get_weather", {})]),
    ("llama3_json", f"<|python_tag|>{F}", None, [("f", ARGUMENTS)]),
    ("llama3_json", f"See <|python_tag|>{F}", "See", [("f", ARGUMENTS)]),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")', "", []),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', "", []),
    ("mistral", f"[TOOL_CALLS] [{F}, {G}]", None, [("f", ARGUMENTS), ("get_weather", {})]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g.h[ARGS]{}', None, [("f", {"a": 1}), ("g.h", {})]),
    ("mistral", "[TOOL_CALLS]just words", "", []),
    ("phi4_mini_json", f"functools[{F},{G}]", None, [("f", ARGUMENTS), ("get_weather", {})]),
    ("phi4_mini_json", f"<|tool_call|>[{F}]<|/tool_call|>", None, [("f", ARGUMENTS)]),
    ("phi4_mini_json", "functools is a module", "", []),
    ("granite", f"<|tool_call|>[{F}]", None, [("f", ARGUMENTS)]),
    ("json", f"[{F}, {G}]", None, [("f", ARGUMENTS), ("get_weather", {})]),
    ("json", '{"answer": 42}', "", []),
    ("json", "[1, 2]", "", []),
]


def read(form: str, pieces: Sequence[str]) -> dict[str, Any]:
    parser = CallParser(TOOL_FORMATS[form], NAMES)
    message = Message()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    answer = message.as_dict("assistant", "", include_reasoning=True)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.get("tool_calls", [])]
    return {"content": answer["content"], "calls": calls}


@pytest.mark.parametrize(("form", "text", "content", "calls"), WRITTEN)
def test_calls_are_found_and_the_rest_is_content(
    form: str, text: str, content: str | None, calls: list[tuple[str, Any]]
) -> None:
    answer = read(form, [text])
    assert [(name, json.loads(arguments)) for name, arguments in answer["calls"]] == calls
    assert answer["content"] == (text if not calls else content)
    assert read(form, list(text)) == answer


PIECES = [
    *("<tool_call>", "</tool_call>", "<tool", "</", "[TOOL_CALLS]", "<|python_tag|>", "functools", "<|/tool_call|>"),
    *(F, G, F[:-1], "{", "}", "[", "]", ",", ";", " ", "\n", '"', "\\", '{"name": "f"}', "f", "[ARGS]", "x", "é", "1"),
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(TOOL_FORMATS)), texts, st.data())
def test_however_a_text_is_cut_it_reads_the_same(form: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, [text])
    assert read(form, pieces) == whole
    assert read(form, list(text)) == whole
    if not whole["calls"]:
        assert whole["content"] == text
    for _, arguments in whole["calls"]:
        assert isinstance(json.loads(arguments), dict)


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.integers() | st.text() | st.booleans(), st.lists, max_leaves=5)
    )
)
def test_arguments_survive(arguments: dict[str, Any]) -> None:
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    assert [(name, json.loads(given)) for name, given in read("hermes", [text])["calls"]] == [("f", arguments)]


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {'),
        ("hermes", '\\"'),
        ("hermes", " "),
        ("llama3_json", '[{"name": "f"}; '),
        ("llama3_json", "<|python_tag|>[{"),
        ("mistral", "[TOOL_CALLS]f["),
        ("phi4_mini_json", "functools ["),
        ("json", "[{"),
    ],
)
def test_half_a_megabyte_made_to_hurt_is_read_at_once_and_stays_content(form: str, unit: str) -> None:
    text = '<tool_call>{"a": ' + unit * (520_000 // len(unit))  # a reader that goes back takes minutes for it
    assert read(form, [text]) == {"content": text, "calls": []}
    assert read(form, [text[at : at + 16] for at in range(0, len(text), 16)]) == {"content": text, "calls": []}


def test_half_a_megabyte_of_calls_is_read_at_once() -> None:
    text = "<tool_call>" + (G + "x") * 12_000
    assert len(read("hermes", [text])["calls"]) == 1
    assert len(read("mistral", ["[TOOL_CALLS]" + G * 12_000])["calls"]) == 12_000


def test_a_call_begins_once_and_its_arguments_follow() -> None:
    parser = CallParser(TOOL_FORMATS["hermes"], NAMES)
    deltas = [delta for char in f"<tool_call>{F}</tool_call><tool_call>{G}" for delta in parser.feed(char)]
    assert [type(delta) for delta in deltas] == [CallStart, Arguments, CallStart, Arguments]
    starts = [delta for delta in deltas if isinstance(delta, CallStart)]
    assert [start.index for start in starts] == [0, 1]
    assert starts[0].id != starts[1].id


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    assert read("hermes", [text])["calls"] == [("f", '{"a": "\\ud800"}')]


@pytest.mark.parametrize("number", ["1e999", "9" * 5000, "NaN"])
def test_numbers_that_json_cannot_hold_make_no_call(number: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'
    assert read("hermes", [text]) == {"content": text, "calls": []}


def test_mistral_ids_are_as_its_template_wants_them() -> None:
    (start, _) = CallParser(TOOL_FORMATS["mistral"], NAMES).feed("[TOOL_CALLS]f{}")
    assert isinstance(start, CallStart)
    assert len(start.id) == 9
    assert start.id.isalnum()


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("... <tool_call></tool_call> ...", "hermes"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... Environment: ipython ...", "llama3_json"),
        ("... <|tool|> <|/tool|> ...", "phi4_mini_json"),
        ("...", "json"),
    ],
)
def test_the_template_says_which_format(source: str, form: str) -> None:
    template = ChatTemplate(source, ByteTokenizer())  # type: ignore[arg-type]
    assert Formats.chosen(ServerConfig(), template).tools is TOOL_FORMATS[form]
    assert Formats.chosen(ServerConfig(tool_call_parser="hermes"), template).tools is TOOL_FORMATS["hermes"]


def test_every_flag_value_is_a_format() -> None:
    assert set(TOOL_CALL_PARSERS) == {"auto", *TOOL_FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}
