"""What a caller asks an output to look like is compiled whole, or refused with what cannot be enforced."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.engine import grammar_compiler
from pagemill.engine.grammar_compiler import MAX_CHARS, compile_grammar
from pagemill.errors import RequestError
from pagemill.params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "shoe-size"}}}, "format: shoe-size"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-ahead"),
        ({"type": "object", "x-guidance": {"lenient": True}, "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(RequestError, match=keyword):
        compile_grammar(StructuredOutputsParams(json=schema))


def test_a_lenient_schema_is_enforced_as_far_as_it_can_be() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "shoe-size"}}
    compile_grammar(StructuredOutputsParams(json=schema, lenient=True))
    with pytest.raises(RequestError, match="no JSON"):
        compile_grammar(StructuredOutputsParams(json={"a": float, "b": 1}, lenient=True))


@pytest.mark.parametrize(
    "values",
    [{"regex": r"[^\s\S]"}, {"grammar": "start: start"}, {"json": {"$ref": "#"}}],
    ids=lambda values: min(values),
)
def test_a_form_that_no_text_fits_is_refused_shortly_and_always_in_the_same_words(values: dict[str, Any]) -> None:
    told = set()
    for _ in range(2):
        grammar_compiler._answer.cache_clear()
        with pytest.raises(RequestError, match="cannot be enforced: no text fits it") as caught:
            compile_grammar(StructuredOutputsParams(**values))
        assert caught.value.param == "structured_outputs"
        told.add(str(caught.value))
    assert len(told) == 1
    assert len(told.pop()) < 200


@pytest.mark.parametrize(
    "grammar", ['start: "a" rest\nrest: rest', 'start: ""', "start: /a?/", 'start: <|im_end|> "a"']
)
def test_a_grammar_that_some_beginning_fits_is_taken(grammar: str) -> None:
    compile_grammar(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"regex": "["}, "unclosed"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json": "{"}, "JSON schema"),
        ({"json": "3"}, "object"),
        ({"regex": "a" * (MAX_CHARS + 1)}, str(MAX_CHARS)),
    ],
)
def test_what_is_malformed_or_too_long_is_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        compile_grammar(StructuredOutputsParams(**values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": [1]},
        {"regex": 3},
        {"structural_tag": 3},
        {"regex": "a", "thought": ["", "x"]},
        {"json": {}, "thought": ["x"]},
        {"json": {}, "thought": ["x", ""]},
    ],
)
def test_exactly_one_form_of_the_right_type_is_taken(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams.create(structured_outputs=values)


def test_allowed_token_ids_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude"):
        SamplingParams.create(structured_outputs={"regex": "a"}, allowed_token_ids=[1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYWORDS = [
    *("type", "properties", "items", "prefixItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs"),
    *("required", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "multipleOf", "minimum"),
    *("maximum", "additionalProperties", "patternProperties", "not", "x-guidance"),
]
WORDS = st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/a", "a", "(a*)*", "email", 10**9, 0.1])
SCHEMAS = st.recursive(
    WORDS | JSON,
    lambda inner: st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner | st.lists(inner, max_size=3), max_size=4),
    max_leaves=12,
)
REGEXES = st.text("ab().*+?|[]{}1,\\dwb^$-/\n", max_size=24)
GRAMMARS = st.text('root::= "ab"()*+?|[]{}/%:\n_1~', max_size=40).map(lambda text: "root ::= " + text)


def tag_of(schema: Any) -> dict[str, Any]:
    return {"triggers": ["<"], "structures": [{"begin": "<x>", "schema": schema, "end": ""}]}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        SCHEMAS.filter(lambda schema: isinstance(schema, dict)).map(lambda schema: {"json": json.dumps(schema)}),
        REGEXES.map(lambda text: {"regex": text}),
        GRAMMARS.map(lambda text: {"grammar": text}),
        SCHEMAS.map(lambda schema: {"structural_tag": tag_of(schema), "thought": ("<a>", "</a>")}),
    )
)
def test_no_input_hangs_or_crashes_the_compiler(values: dict[str, Any]) -> None:
    refusal = ""
    try:
        compile_grammar(StructuredOutputsParams(**values))
    except RequestError as error:
        refusal = str(error)
    assert "processor time" not in refusal
    assert "exit code" not in refusal


RUNAWAYS: dict[str, dict[str, Any]] = {
    "a pattern for each of many properties": {
        "patternProperties": {f"^{number:03}": {"type": "string"} for number in range(900)}
    },
    "a number with as many states as it has multiples": {"multipleOf": 10**6, "maximum": 10**6},
    "many patterns at once": {
        "allOf": [{"type": "string", "pattern": f"(.*{number}.{{10}})"} for number in range(100, 140)]
    },
}


def checkers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if any("grammar_check" in word for word in child.cmdline())]


@pytest.mark.parametrize("schema", RUNAWAYS.values(), ids=RUNAWAYS.keys())
def test_a_grammar_that_runs_away_is_ended_and_others_compile(schema: dict[str, Any]) -> None:
    asked = StructuredOutputsParams(json=json.dumps(schema))
    with pytest.raises(RequestError, match="processor time"):
        compile_grammar(asked)
    number = len(json.dumps(schema))  # of its own, not compiled before
    assert taken(StructuredOutputsParams(regex=f"{number}x*"), f"{number}xxy") == (f"{number}xx", True)
    (before,) = checkers()
    with pytest.raises(RequestError, match="processor time"):
        compile_grammar(asked)
    assert checkers() == [before], "what ran away once is not tried again"


def test_a_grammar_whose_first_step_would_hold_everybody_up_is_refused() -> None:
    with pytest.raises(RequestError, match="for a step"):
        compile_grammar(StructuredOutputsParams(regex="a{1000000}"))
    assert taken(StructuredOutputsParams(regex="a{1000}"), "a" * 1000) == ("a" * 1000, True)


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1])
def test_a_grammar_that_brings_the_library_down_brings_down_nothing_else(number: int) -> None:
    with pytest.raises(RequestError, match="exit code -11"):
        compile_grammar(StructuredOutputsParams(json={"const": number}))
    assert taken(StructuredOutputsParams(regex=f"{number}"), f"{number}") == (str(number), True)


def test_a_panic_of_the_library_is_told_in_words_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    schema = {"required": {"secret": "é" * 100}}  # its error message is cut within a character
    with pytest.raises(RequestError, match="llguidance fails on it") as caught:
        compile_grammar(StructuredOutputsParams(json=schema))
    assert "secret" not in str(caught.value)
    assert "secret" not in capfd.readouterr().err


def test_a_compiler_that_was_ended_is_started_again() -> None:
    compile_grammar(StructuredOutputsParams(regex="once"))
    for checker in checkers():
        checker.kill()
        checker.wait()
    assert taken(StructuredOutputsParams(regex="again"), "again") == ("again", True)


def test_a_form_that_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError, match="no text"):
        compile_grammar(StructuredOutputsParams(regex="\ud800"))


class _Bytes:
    """A vocabulary of bytes."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([index]) for index in range(256)] + [b"</s>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def taken(asked: StructuredOutputsParams, text: str) -> tuple[str, bool]:
    """As much of a text as the grammar takes, and whether it may end there."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257), compile_grammar(asked), log_level=0)
    count = matcher.try_consume_tokens(list(text.encode()))
    return text.encode()[:count].decode(), matcher.is_accepting()


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("thought", "text"),
    [
        (("<think>", "</think>"), '{"a": 1}'),
        (("<think>", "</think>"), '<think>\nso {\n</think>\n\n{"a": 1}'),
        (("", "</think>"), 'so {\n</think>{"a": 1}'),
    ],
)
def test_a_thought_may_precede_json_and_nothing_else_may(thought: tuple[str, str], text: str) -> None:
    asked = StructuredOutputsParams(json=A, thought=thought)
    assert taken(asked, text) == (text, True)
    assert taken(asked, text + "x") == (text, True)
    assert taken(asked, text.replace("1", "x"))[0] == text[: text.index("1")]
    with pytest.raises(RequestError, match="uniqueItems"):
        compile_grammar(StructuredOutputsParams(json={"uniqueItems": True}, thought=thought))


TAG: dict[str, Any] = {
    "triggers": ["<tool"],
    "structures": [
        {"begin": "<tool_f>", "schema": A, "end": "</tool>"},
        {"begin": "<tool_g>", "schema": {"type": "object"}, "end": "</tool>"},
    ],
}
CALL = '<tool_f>{"a": 1}</tool>'


@pytest.mark.parametrize(
    ("thought", "text", "upto"),
    [
        (None, f"well {CALL} and {CALL}!", None),
        (None, '<tool_g>{"b": [2]}</tool>', None),
        (None, "<to be or <b>not", None),
        (None, "a <tool_h>", "a <tool_"),
        (None, 'a <tool_f>{"a": "x"}', 'a <tool_f>{"a": '),
        (None, CALL + "<tool_f>{}", CALL + "<tool_f>{"),
        (("<think>", "</think>"), f"<think>a <tool_h> b</think>{CALL}", None),
        (("<think>", "</think>"), f"<think>a</think>b{CALL}<tool_h>", f"<think>a</think>b{CALL}<tool_"),
        (("<think>", "</think>"), f"b{CALL}<tool_h>", f"b{CALL}<tool_"),
        (("<think>", "</think>"), f"{CALL}", None),
        (("<think>", "</think>"), "<b>", None),
        (("", "</think>"), f"a <tool_h> b</think>{CALL} c", None),
        (("", "</think>"), "a</think><tool_h>", "a</think><tool_"),
    ],
)
def test_after_a_trigger_only_its_tags_are_taken(thought: tuple[str, str] | None, text: str, upto: str | None) -> None:
    asked = StructuredOutputsParams(structural_tag=TAG, thought=thought)
    found, may_end = taken(asked, text)
    assert found == (text if upto is None else upto)
    assert may_end or upto is not None


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        ("{", "structural tag"),
        ({"structures": []}, "triggers"),
        ({"structures": [{"begin": "x", "end": ""}], "triggers": ["y"]}, "begins with none"),
        ({"structures": [{"begin": "x"}], "triggers": ["x"]}, "begin, schema and end"),
        (tag_of({"uniqueItems": True}), "uniqueItems"),
        ({"structures": [{"begin": "x", "schema": 3, "end": ""}], "triggers": ["x"]}, "object"),
        ({"structures": [{"begin": "x", "end": ""}], "triggers": [""]}, "trigger"),
    ],
)
def test_a_structural_tag_that_is_none_is_refused(tag: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        compile_grammar(StructuredOutputsParams(structural_tag=tag))


def test_whitespace_is_as_the_caller_says() -> None:
    asked = {"json": A, "disable_additional_properties": True}
    spaced = SamplingParams.create(structured_outputs={**asked, "whitespace_pattern": "[ ]{2}"}).structured_outputs
    assert spaced is not None
    assert taken(spaced, '{  "a":  1  }') == ('{  "a":  1  }', True)
    assert taken(spaced, '{ "a": 1}')[0] == "{ "
    with pytest.raises(RequestError, match="whitespace_pattern"):
        SamplingParams.create(structured_outputs={"json": {}, "whitespace_pattern": 3})
