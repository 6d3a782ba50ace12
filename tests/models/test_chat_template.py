"""Chat templates: what reaches them, what they may do, and what their faults look like to a caller."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers.utils import chat_template_utils

from pagemill.errors import RequestError
from pagemill.models import template_sandbox
from pagemill.models.chat_template import ChatTemplate
from pagemill.models.sources import ModelSource
from pagemill.models.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = Tokenizer(
    Backend(models.BPE()), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, eos_ids=[], before=[]
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{% set c = m.content %}{% for p in c | list %}({{ p.text }}){% endfor %}{% endfor %}"
)
TOOLS = """\
{%- if tools is not none %}
    {%- for tool in tools %}
{{ tool | tojson(indent=4) }}
    {% endfor %}
{%- endif %}
{%- set ns = namespace(found=false) %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set ns.found = true %}
        {%- for call in message.tool_calls %}
CALL {{ call.function.name }} {{ call.function.arguments | tojson }}
            {%- break %}
        {%- endfor %}
    {%- elif loop.last %}
{{ message.role ~ ": " ~ message.content | trim }}
    {%- endif %}
{%- endfor %}
{% generation %}found={{ ns.found }}{% endgeneration %}
"""
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, TOKENIZER).render(messages, **options)


def refusal(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        render(source, messages, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return str(caught.value)


@pytest.mark.parametrize("source", [CHATML, PARTS, TOOLS, LLAMA2])
@pytest.mark.parametrize("opening", [True, False])
def test_it_renders_as_transformers_does(source: str, opening: bool) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é <b>", "n": [1, 2.5, None]}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": " What is 2 + 2? "}]
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "日本 'x'"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    compiled = chat_template_utils._compile_jinja_template(source)
    expected = compiled.render(
        messages=messages, tools=tools, add_generation_prompt=opening, bos_token="<s>", eos_token="</s>"
    )
    assert render(source, messages, tools=tools, add_generation_prompt=opening) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text()), min_size=1, max_size=5))
def test_any_text_goes_through_unchanged(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert render(CHATML, messages, add_generation_prompt=False) == expected


def test_text_parts_are_joined_where_the_template_wants_a_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(CHATML, [{"role": "user", "content": parts}]).startswith("<|im_start|>user\none\ntwo<|im_end|>")
    assert render(CHATML, [{"role": "user", "content": []}]).startswith("<|im_start|>user\n<|im_end|>")


def test_parts_stay_parts_where_the_template_wants_them() -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(PARTS, [{"role": "user", "content": parts}]) == "[user](one)(two)"
    assert render(PARTS) == "[user]hi"
    assert render(ONLY_PARTS) == "(hi)"


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], [3], 3, {"a": 1}, [{"text": "no type"}]],
)
def test_other_content_is_refused_by_place(content: Any) -> None:
    assert "messages[0]" in refusal(CHATML, [{"role": "user", "content": content}])


def test_absent_content_is_empty_text_or_none_beside_tool_calls() -> None:
    assert render("{{ messages[0].content is none }}", [{"role": "user"}]) == "False"
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    source = "{{ messages[0].content is none }}{{ messages[0].tool_calls | length }}"
    assert render(source, [{"role": "assistant", "tool_calls": calls}]) == "True1"


@pytest.mark.parametrize("absent", [{}, {"content": None}])
def test_a_template_without_tool_calls_gets_them_as_text(absent: dict[str, Any]) -> None:
    calls = [{"function": {"name": name, "arguments": '{"a": "ü"}'}} for name in ("f", "g")]
    shown = render("{{ messages[0].content }}", [{"role": "assistant", "tool_calls": calls} | absent])
    assert shown == '{"name": "f", "arguments": {"a": "ü"}}\n{"name": "g", "arguments": {"a": "ü"}}'
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    assert render("{{ messages[0].content }}", [said]) == "Let me see."


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for sent, seen in (
        ('{"b": 1, "a": "é"}', '{"b": 1, "a": "é"}'),
        ("not json", '"not json"'),
        ("", "{}"),
        ("3", '"3"'),
    ):
        call = {"id": "1", "function": {"name": "f", "arguments": sent}}
        assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == seen


def test_the_templates_own_words_reach_the_caller() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert "System role not supported" in refusal(LLAMA2, messages)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nosuch.thing }}", "'nosuch' is undefined"),
        ("{{ messages | nosuch }}", "nosuch"),
        ("{% for m in messages %}", "line 1"),
        ("{{ '%d' % 'x' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
    ],
)
def test_a_template_that_fails_is_a_request_error(source: str, words: str) -> None:
    assert words in refusal(source)


def test_an_empty_conversation_and_an_empty_prompt_are_refused() -> None:
    assert "prompt cannot be empty" in refusal(CHATML, [])
    assert "prompt cannot be empty" in refusal("{% if false %}x{% endif %}")
    assert "messages[0] has no role" in refusal(CHATML, [{"content": "x"}])


def test_the_last_message_is_continued_without_an_end() -> None:
    messages = [*USER, {"role": "assistant", "content": "1, 2, "}]
    text = render(CHATML, messages, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n1, 2, "
    # This template strips messages, so the prompt ends as it would inside a conversation.
    assert render(LLAMA2, messages, continue_final_message=True) == "<s>[INST] hi [/INST] 1, 2,"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, parts, continue_final_message=True) == "[assistant](a)(b"


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    assert "cannot be continued" in refusal("x{{ messages[0].role }}", continue_final_message=True)


def test_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ bos_token }}", bos_token="<b>") == "<b>"


def test_the_date_is_there() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


BIG = "{% set big = 'x' * 400000 %}"


def grow(start: str, following: str) -> str:
    """A value that is replaced 99 times by one made of it."""
    return (
        "{% set n = namespace(x=" + start + ") %}{% for i in range(99) %}{% set n.x = " + following + " %}{% endfor %}"
    )


GREEDY = {
    "endless nesting of loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over generators": "{% for a in range(999) %}{% for b in range(999)|map('string') %}{% endfor %}{% endfor %}",
    "macros that call each other": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a range too long": "{% for a in range(10 ** 9) %}{% endfor %}",
    "text times a number": "{{ 'x' * 10 ** 9 }}",
    "a number times text": "{{ 10 ** 9 * 'x' }}",
    "a list times a number": "{{ [1] * 10 ** 9 }}",
    "towers of powers": "{{ 10 ** 100000 }}",
    "products of products": grow("7", "n.x * n.x"),
    "doubling with +": grow("'xx'", "n.x + n.x"),
    "doubling with ~": grow("'xx'", "n.x ~ n.x"),
    "doubling lists": grow("[1]", "n.x + n.x"),
    "lists within lists": grow("[1]", "[n.x, n.x]"),
    "tuples within tuples": grow("(1,2)", "(n.x, n.x)"),
    "objects within objects": grow("{}", "{1: n.x, 2: n.x}"),
    "dict() within dict()": grow("{}", "dict(a=n.x, b=n.x)"),
    "defaults within lists": grow("[1]", "['', '']|map('default', n.x, true)|list"),
    "lists as text": "x{{ 'abc'" + "|list|string" * 60 + " }}",
    "json of json": "{{ '\"'" + "|tojson" * 60 + " }}",
    "replace": BIG + "{{ big.replace('x', big) }}",
    "replace filter": BIG + "{{ big|replace('x', big) }}",
    "join": BIG + "{{ big.join(big) }}",
    "join filter": BIG + "{{ big|join(big) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(9999) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d'|format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format often": BIG + "{{ ('{0}' * 9999).format(big) }}",
    "indent": "{{ ('\n' * 99999)|indent(9999) }}",
    "json indent": "{{ [1]|tojson(indent=10 ** 9) }}",
    "output": BIG + "{% for i in range(99) %}{{ big }}{% endfor %}",
    "output of a macro": BIG
    + "{% macro m() %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endmacro %}{{ m()|length }}",
    "output of a block": BIG + "{% set s %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}{{ s|length }}",
    "centre": "{{ 'x'|center(10 ** 9) }}",
    "batches": "{{ [1]|batch(10 ** 9, 'x')|list }}",
}


@pytest.mark.parametrize("case", GREEDY)
def test_a_template_that_asks_for_too_much_is_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SIZE", 1_000_000)
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 50_000)
    assert refusal(GREEDY[case])


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ range.__self__ }}",
    "{{ environment }}{{ cycler }}{{ lipsum }}{{ joiner }}x{{ nosuch.x }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python(source: str) -> None:
    try:
        text = render(source)
    except RequestError:
        return
    assert text in ("", "None")


def test_a_long_conversation_is_not_too_much() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 20} for i in range(5000)]
    assert len(render(CHATML, messages)) > 500_000
    assert len(render(TOOLS, messages)) > 50
    assert len(render(CHATML, [{"role": "user", "content": "x" * 4_000_000}])) > 4_000_000


def test_the_embedded_models_template_renders_as_published(embedded_source: ModelSource) -> None:
    tokenizer = load_tokenizer(embedded_source)
    assert tokenizer.chat_template is not None
    text = ChatTemplate(tokenizer.chat_template, tokenizer).render(USER)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<' + messages[0]['tool_calls'][0]['function']['arguments'] + '>' }}",
        "<{{ messages[0].tool_calls[0].function.arguments }}>",
        "<{{ messages[0].tool_calls[0].function.arguments | tojson }}>",
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_are_written_as_json_whichever_form_the_template_wants(source: str, arguments: Any) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    assert render(source, [{"role": "assistant", "tool_calls": calls}]) == '<{"a": 1}>'


def test_only_a_template_of_the_server_s_own_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    broken = ChatTemplate("{% if", TOKENIZER)
    with pytest.raises(RequestError, match="does not compile"):
        broken.render(USER)
    assert not caplog.records
    broken.warn_if_broken()
    assert "does not compile" in caplog.text
