"""Tools and reasoning through the official client: a fake engine spells what a model might write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill.config import ServerConfig
from pagemill.engine.grammar_compiler import compile_grammar
from pagemill.models.chat_template import ChatTemplate
from pagemill.params import StructuredOutputsParams
from pagemill.server.answer_schemas import ChatCompletionResponse
from pagemill.server.tools import read_tools
from tests.server.conftest import Served, serving
from tests.server.fake_engine import TEMPLATE, FakeEngine

PATH = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TWO = f"Right.\n{CALL}\n{CALL}"
HERMES = TEMPLATE + "{# <tool_call> #}{% if tools %}[{{ tools | tojson }}]{% endif %}"
THINKING = HERMES + "{# <think></think> #}"


def engine_of(script: str, template: str = HERMES) -> FakeEngine:
    engine = FakeEngine(script, max_model_len=4096)
    engine.chat_template = ChatTemplate(template, engine.tokenizer)  # type: ignore[arg-type]
    return engine


async def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The message of each choice, its deltas added up, and how it ended."""
    choices: dict[int, dict[str, Any]] = {}
    stream = await served.openai.chat.completions.create(model="", messages=HI, stream=True, **body)
    async for event in stream:
        for choice in event.choices:
            into = choices.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "reason": None})
            into["content"] += choice.delta.content or ""
            into["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(into["calls"])
                    into["calls"].append([call.function.name, ""])
                else:
                    assert call.function.name is None
                into["calls"][call.index][1] += call.function.arguments or ""
            into["reason"] = choice.finish_reason or into["reason"]
    return [choices[index] for index in sorted(choices)]


async def whole(served: Served, **body: Any) -> list[dict[str, Any]]:
    answer = await served.openai.chat.completions.create(model="", messages=HI, **body)
    return [
        {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning_content", None) or "",
            "calls": [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()],  # type: ignore[union-attr]
            "reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]


async def both(served: Served, **body: Any) -> dict[str, Any]:
    """The first answer, once it is sure that a stream says the same."""
    answers = await whole(served, **body)
    assert await streamed(served, **body) == answers
    return answers[0]


async def test_calls_are_read_and_are_the_reason_for_the_end() -> None:
    async with serving(engine_of(TWO)) as served:
        answer = await both(served, tools=TOOLS, n=2)
    assert answer["content"] == "Right."
    assert [(name, json.loads(arguments)) for name, arguments in answer["calls"]] == [("f", {"a": 1})] * 2
    assert answer["reason"] == "tool_calls"


async def test_content_beside_calls_alone_is_null_and_the_answer_fits_its_schema() -> None:
    async with serving(engine_of(CALL)) as served:
        answer = await served.http.post(PATH, json={"messages": HI, "tools": TOOLS})
    assert answer.json()["choices"][0]["message"]["content"] is None
    ChatCompletionResponse.model_validate_json(answer.content, strict=True)


async def test_one_call_where_calls_may_not_be_parallel() -> None:
    async with serving(engine_of(TWO)) as served:
        assert len((await both(served, tools=TOOLS, parallel_tool_calls=False))["calls"]) == 1


async def test_without_tools_or_with_none_the_text_is_the_answer() -> None:
    async with serving(engine_of(TWO)) as served:
        for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await both(served, **extra)
            assert (answer["content"], answer["calls"], answer["reason"]) == (TWO, [], "stop")
            assert "[" not in served.engine.tokenizer.decode(served.engine.seen[-1][0])
    async with serving(engine_of(TWO), ServerConfig(enable_auto_tool_choice=False)) as served:
        assert (await both(served, tools=TOOLS))["content"] == TWO


async def test_an_end_in_the_middle_of_a_call_leaves_its_text_as_content() -> None:
    async with serving(engine_of(CALL[:40])) as served:
        answer = await both(served, tools=TOOLS)
        assert (answer["content"], answer["calls"], answer["reason"]) == (CALL[:40], [], "stop")
        answer = await both(served, tools=TOOLS, max_tokens=30)
        assert (answer["content"], answer["calls"], answer["reason"]) == (CALL[:30], [], "length")


async def test_logprobs_come_with_held_text_too() -> None:
    async with serving(engine_of(CALL)) as served:
        stream = await served.openai.chat.completions.create(
            model="", messages=HI, tools=TOOLS, stream=True, logprobs=True
        )
        tokens = [
            item.token
            async for event in stream
            for choice in event.choices
            if choice.logprobs
            for item in choice.logprobs.content or ()
        ]
    assert "".join(tokens) == CALL + "</s>"


NAMED = {"type": "function", "function": {"name": "f"}}
LISTED = '[ {"name": "f", "arguments": {"a": 1, "b": "}{"}},\n{"name":"f","arguments":{"a": 2}} ]'


async def test_required_calls_are_read_from_the_list_that_the_grammar_makes() -> None:
    async with serving(engine_of(LISTED)) as served:
        answer = await both(served, tools=TOOLS, tool_choice="required", n=2)
        asked = served.engine.seen[-1][1].structured_outputs
        only_one = await both(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        alone = served.engine.seen[-1][1].structured_outputs
    assert answer == {
        "content": "",
        "reasoning": "",
        "calls": [["f", '{"a": 1, "b": "}{"}'], ["f", '{"a": 2}']],
        "reason": "tool_calls",
    }
    assert asked is not None
    assert isinstance(asked.json, dict)
    assert asked.json["items"]["anyOf"][0]["properties"]["name"] == {"const": "f"}
    assert "maxItems" not in asked.json
    assert alone is not None
    assert isinstance(alone.json, dict)
    assert alone.json["maxItems"] == 1
    assert len(only_one["calls"]) == 1


async def test_a_named_call_streams_its_name_once_then_arguments_and_ends_with_stop() -> None:
    async with serving(engine_of('{"a": 12}')) as served:
        answer = await both(served, tools=TOOLS, tool_choice=NAMED)
        assert answer == {"content": "", "reasoning": "", "calls": [["f", '{"a": 12}']], "reason": "stop"}
        cut = await both(served, tools=TOOLS, tool_choice=NAMED, max_tokens=4)
        assert (cut["calls"], cut["reason"]) == ([["f", '{"a"']], "length")
        stream = await served.openai.chat.completions.create(
            model="",
            messages=HI,
            tools=TOOLS,
            tool_choice=NAMED,
            stream=True,  # type: ignore[arg-type]
        )
        pieces = [call async for event in stream for call in event.choices[0].delta.tool_calls or ()]
    assert [piece.id is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert len(pieces) > 3


@pytest.mark.parametrize(
    ("opened", "script", "marks"),
    [
        ("", '<think>hm</think>{"a": 1}', ("<think>", "</think>")),
        ("<think>", 'hm</think>\n{"a": 1}', ("", "</think>")),
        ("<think>\n\n</think>\n\n", '{"a": 1}', None),
    ],
)
async def test_a_model_that_thinks_does_so_before_a_forced_call_too(
    opened: str, script: str, marks: tuple[str, str] | None
) -> None:
    thought = "hm" if marks else ""
    async with serving(engine_of(script, THINKING + opened)) as served:
        answer = await both(served, tools=TOOLS, tool_choice=NAMED)
        assert (answer["calls"], answer["reasoning"], answer["content"]) == ([["f", '{"a": 1}']], thought, "")
        structured = served.engine.seen[-1][1].structured_outputs
        assert structured is not None
        assert structured.thought == marks
        text = await both(served, response_format={"type": "json_object"})
        assert (text["content"], text["reasoning"]) == ('{"a": 1}', thought)
        structured = served.engine.seen[-1][1].structured_outputs
        assert structured is not None
        assert structured.thought == marks
        compile_grammar(structured)


async def test_calls_of_strict_functions_are_kept_to_their_schemas_while_text_stays_free() -> None:
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "name": "g", "strict": True}}
    async with serving(engine_of(TWO, THINKING)) as served:
        assert len((await both(served, tools=[*TOOLS, strict]))["calls"]) == 2
        structured = served.engine.seen[-1][1].structured_outputs
        assert structured is not None
        tag, thought = structured.structural_tag, structured.thought
        assert isinstance(tag, dict)
        for extra in ({"tools": TOOLS}, {"tools": [strict], "tool_choice": "none"}):
            await both(served, **extra)
            assert served.engine.seen[-1][1].structured_outputs is None
    assert thought == ("<think>", "</think>")
    assert tag["triggers"] == ["<tool_call>"]
    assert [each["begin"] for each in tag["structures"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in "fg"
    ]
    assert [each["schema"] for each in tag["structures"]] == [{"type": "object"}, TOOLS[0]["function"]["parameters"]]
    compile_grammar(structured)
    call = tag["structures"][1]["begin"] + '{"a": 1}' + tag["structures"][1]["end"]
    async with serving(engine_of(call)) as served:
        assert (await both(served, tools=[strict]))["calls"] == [["g", '{"a": 1}']]


async def test_allowed_tools_leave_the_others_out() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    async with serving(engine_of(LISTED)) as served:
        answer = await both(served, tools=[*TOOLS, other], tool_choice=allowed)
        asked = served.engine.seen[-1][1].structured_outputs
    assert len(answer["calls"]) == 2
    assert asked is not None
    assert isinstance(asked.json, dict)
    assert len(asked.json["items"]["anyOf"]) == 1


def test_references_within_a_tools_schema_stay_references_to_it() -> None:
    parameters = {
        "$defs": {"T": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}},
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/T"}, "whole": {"$ref": "#"}, "other": {"const": {"$ref": "#"}}},
    }
    tools = [*TOOLS, {"type": "function", "function": {"name": "g", "parameters": parameters, "strict": True}}]
    use = read_tools(tools, "required", parallel=True)
    schema = use.schema()
    assert schema is not None
    assert use.strict
    assert schema["$defs"]["1"]["properties"] == {
        "root": {"$ref": "#/$defs/1/$defs/T"},
        "whole": {"$ref": "#/$defs/1"},
        "other": {"const": {"$ref": "#"}},
    }
    compile_grammar(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("any", TOOLS, "tool_choice"),
        ("required", None, "tool_choice"),
        ({"type": "function", "function": {"name": "g"}}, TOOLS, "tool_choice"),
        ({"type": "function"}, TOOLS, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": []}}, TOOLS, "tool_choice"),
        ("auto", TOOLS * 2, "tools"),
    ],
)
async def test_choices_that_make_no_sense_are_refused_by_name(choice: Any, tools: Any, param: str) -> None:
    async with serving(engine_of(CALL)) as served:
        answer = await served.http.post(PATH, json={"messages": HI, "tools": tools, "tool_choice": choice})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_forced_call_excludes_other_constraints_but_a_format_of_the_content() -> None:
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
    async with serving(engine_of(LISTED)) as served:
        refused = await served.http.post(PATH, json={**body, "guided_regex": "a"})
        taken = await served.http.post(PATH, json={**body, "response_format": {"type": "json_object"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    assert len(taken.json()["choices"][0]["message"]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": 1}}, "tools[0].function.parameters"),
    ],
)
async def test_tools_that_are_none_are_refused_by_place(tool: Any, param: str) -> None:
    async with serving(engine_of(CALL)) as served:
        answer = await served.http.post(PATH, json={"messages": HI, "tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_conversation_with_calls_goes_to_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.a }} {{ c.id }}){% endfor %}"
        "{{ m.tool_call_id or '' }};{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "ok"})
    async with serving(engine_of("fine", template)) as served:
        answer = await served.openai.chat.completions.create(model="", messages=messages, tools=TOOLS)
        assert answer.choices[0].message.content == "fine"
        prompt = served.engine.tokenizer.decode(served.engine.seen[-1][0])
    assert prompt == "user:hi;assistant:(f 7 1);tool:ok1;"


async def test_reasoning_is_apart_from_the_answer() -> None:
    script = f"<think>\nso <tool_call> so\n</think>\n\n{TWO}"
    async with serving(engine_of(script, THINKING)) as served:
        answer = await both(served, tools=TOOLS)
        assert (answer["reasoning"], answer["content"]) == ("so <tool_call> so", "Right.")
        assert len(answer["calls"]) == 2
        hidden = await both(served, tools=TOOLS, extra_body={"include_reasoning": False})
        assert hidden == answer | {"reasoning": ""}
        plain = await both(served)
        assert (plain["content"], plain["calls"]) == (TWO, [])
    async with serving(engine_of(script, THINKING), ServerConfig(reasoning_parser="none")) as served:
        assert (await both(served))["content"] == script


async def test_special_markers_reach_the_parser() -> None:
    async with serving(engine_of("x"), ServerConfig(tool_call_parser="mistral")) as served:
        await served.http.post(PATH, json={"messages": HI, "tools": TOOLS})
        assert served.engine.seen[-1][1].skip_special_tokens is False
        await served.http.post(PATH, json={"messages": HI})
        assert served.engine.seen[-1][1].skip_special_tokens is True
