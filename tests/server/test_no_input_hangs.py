"""Nothing that a client or a model may write hangs or crashes what reads it: parsers, templates, grammars.

A short run always, a long one among the slow tests. What is bounded is CPU time, so that a busy machine does not count.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.engine.grammar_compiler import compile_grammar
from pagemill.errors import RequestError
from pagemill.models.chat_template import ChatTemplate
from pagemill.params import StructuredOutputsParams
from pagemill.server.parsers.answer import AnswerParser, Message
from pagemill.server.parsers.calls import CallParser
from pagemill.server.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from pagemill.server.parsers.registry import TOOL_FORMATS
from tests.engine.test_grammar_compiler import GRAMMARS, REGEXES, SCHEMAS
from tests.models.test_chat_template import CHATML, LLAMA2, PARTS, TOOLS
from tests.server.fake_engine import ByteTokenizer
from tests.server.parsers.test_calls import NAMES, PIECES

MOST_CPU_S = 1.0
LONG = pytest.mark.timeout(1800), pytest.mark.slow


def runs(few: int, many: int) -> pytest.MarkDecorator:
    """A test of so many examples, and a slow one of more."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=LONG)])


def fuzz(count: int, strategy: st.SearchStrategy[Any], read: Callable[[Any], None]) -> None:
    # The same cases each time: a rare input found at random belongs in a test of its own, not in another's change.
    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def each(value: Any) -> None:
        # What took long because the collector had its turn does not the second time.
        assert cpu_s(read, value) < MOST_CPU_S or cpu_s(read, value) < MOST_CPU_S

    each()


def cpu_s(read: Callable[[Any], None], value: Any) -> float:
    start_s = time.process_time()
    read(value)
    return time.process_time() - start_s


WRITTEN = st.tuples(
    st.sampled_from([None, *sorted(TOOL_FORMATS)]),
    st.sampled_from([None, *sorted(REASONING_FORMATS)]),
    st.booleans(),
    st.lists(
        st.one_of(
            st.sampled_from(
                [*PIECES, "<think>", "</think>", "[THINK]", "[/THINK]", "{" * 200, "[" * 200, '{"a":' * 100]
            ),
            st.tuples(st.sampled_from(PIECES), st.integers(1, 300)).map(lambda pair: pair[0] * pair[1]),
            st.text(max_size=8),
        ),
        max_size=30,
    ),
)


@runs(200, 30_000)
def test_what_a_model_writes(count: int) -> None:
    def read(value: tuple[str | None, str | None, bool, list[str]]) -> None:
        tools, reasoning, parallel, pieces = value
        parser = AnswerParser(
            ReasoningParser(REASONING_FORMATS[reasoning], "") if reasoning else None,
            CallParser(TOOL_FORMATS[tools], NAMES) if tools else None,
            parallel=parallel,
        )
        message = Message()
        for piece in pieces:
            message.add(parser.feed(piece))
        message.add(parser.finish())
        answer = message.as_dict("assistant", "", include_reasoning=True)
        for call in answer.get("tool_calls", []):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        json.dumps(answer)

    fuzz(count, WRITTEN, read)


JINJA = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(
                    "{% for m in messages %}",
                    "{% endfor %}",
                    "{{ m.content }}",
                    "{{ m }}",
                    "{{ messages }}",
                    "{{",
                    "}}",
                ),
                *(
                    "{% for a in range(99999) %}",
                    "{% if m.role == 'user' %}",
                    "{% else %}",
                    "{% endif %}",
                    "{% set x = ",
                ),
                *(
                    "{{ messages[0]['content'] * 99999 }}",
                    "{% macro f(a) %}",
                    "{% endmacro %}",
                    "{{ f(f) }}",
                    " %}",
                    "-%}",
                ),
                *(
                    "{{ x ~ x }}",
                    "{% set x = x ~ x %}",
                    "|tojson",
                    "|list",
                    "|join",
                    "loop.index",
                    "''.join(",
                    "namespace(",
                ),
                *(
                    "{{ raise_exception('no') }}",
                    "{% set ns = namespace(a=messages) %}",
                    "{% set ns.a = ns.a + ns.a %}",
                ),
                *(
                    "{{ ''.__class__ }}",
                    "{{ messages.append(messages) }}",
                    "{{ m | tojson | tojson }}",
                    "{% raw %}",
                    "1/0",
                ),
                *(
                    "{{ '%099999d' % 1 }}",
                    "{{ 9 ** 9 ** 9 }}",
                    "{% set x = 'x' * 9999 %}",
                    "{# ",
                    " #}",
                    "\n",
                    "\x00",
                    "é",
                ),
            ]
        ),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id"]),
        st.one_of(
            st.sampled_from(["user", "assistant", "tool", ""]),
            VALUES,
            st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=9)}), max_size=3),
            st.lists(st.fixed_dictionaries({"function": VALUES}), max_size=2),
        ),
    ),
    max_size=4,
)


@runs(100, 4_000)
def test_templates_and_conversations(count: int) -> None:
    def read(value: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> None:
        source, messages, options = value
        with contextlib.suppress(RequestError):
            assert ChatTemplate(source, ByteTokenizer()).render(messages, **options)  # type: ignore[arg-type]

    options = st.fixed_dictionaries(
        {"add_generation_prompt": st.booleans(), "continue_final_message": st.booleans()},
        optional={"tools": st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=2), max_size=2)},
    )
    fuzz(count, st.tuples(JINJA | st.sampled_from([CHATML, PARTS, TOOLS, LLAMA2]), MESSAGES, options), read)


@runs(100, 8_000)
def test_schemas_expressions_and_grammars(count: int) -> None:
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")

    def read(values: dict[str, Any]) -> None:
        with contextlib.suppress(RequestError):
            grammar = compile_grammar(StructuredOutputsParams(**values))
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            for byte in b'{"a": [1, "x"':
                matcher.compute_bitmask()
                matcher.try_consume_tokens([byte])

    forms = st.one_of(
        SCHEMAS.filter(lambda schema: isinstance(schema, dict)).map(lambda schema: {"json": json.dumps(schema)}),
        SCHEMAS.filter(lambda schema: isinstance(schema, dict)).map(
            lambda schema: {"json": json.dumps(schema), "lenient": True}
        ),
        REGEXES.map(lambda text: {"regex": text}),
        GRAMMARS.map(lambda text: {"grammar": text}),
        st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=9).map(lambda choices: {"choice": choices}),
    )
    fuzz(count, forms, read)
