"""The Responses API through the official client, the engine a fake that spells what a model might write."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from pagemill.config import ServerConfig
from pagemill.errors import EngineError
from pagemill.server.answer_schemas import ErrorResponse
from pagemill.server.responses_api import handlers
from pagemill.server.responses_api.items import read_input, to_messages
from pagemill.server.responses_api.schemas import DeletedResponse, ResponseItemList, ResponseObject
from tests.server.conftest import Served, serving
from tests.server.fake_engine import TEMPLATE, FakeEngine
from tests.server.openai_spec import problems
from tests.server.test_tools import HERMES, THINKING, TWO, engine_of

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ALL = f"<think>\nso so\n</think>\n\n{TWO}"


async def ask(served: Served, **body: Any) -> Response:
    return await served.openai.responses.create(model="", **{"input": "hi", **body})


async def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The stream's events, each one as OpenAI describes it."""
    found = []
    async with served.http.stream("POST", PATH, json={"input": "hi", "stream": True, **body}) as answer:
        assert answer.status_code == 200
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                event = json.loads(line.removeprefix("data: "))
                assert event["type"] == name
                assert problems("ResponseStreamEvent", event) == []
                found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def told(event: dict[str, Any]) -> str:
    return str(event["type"]).removeprefix("response.")


def bare(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is drawn anew each time."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def prompt_of(served: Served) -> str:
    return served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)


async def test_text_in_text_out_as_openai_describes_it(served: Served) -> None:
    answer = await ask(served, metadata={"a": "b"}, instructions="Be brief.", max_output_tokens=100)
    assert answer.output_text == "Hello, world."
    assert (answer.status, answer.metadata) == ("completed", {"a": "b"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(served.engine.seen[-1][0]), 14)
    assert prompt_of(served).startswith("<|open|>system: Be brief.<|close|><|open|>user: hi<|close|>")
    raw = (await served.http.post(PATH, json={"input": "hi"})).json()
    assert problems("Response", raw) == []
    ResponseObject.model_validate(raw, strict=True)


async def test_a_stream_tells_every_step_in_order(served: Served) -> None:
    events = await events_of(served, max_output_tokens=3)
    assert [told(event) for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    last = events[-1]["response"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["status"] == "incomplete"
    assert last["output"][0]["content"][0]["text"] == "Hel"


async def test_reasoning_text_and_calls_are_items_whole_and_streamed() -> None:
    async with serving(engine_of(ALL, THINKING)) as served:
        events = await events_of(served, tools=[TOOL])
        streamed = events[-1]["response"]
        whole = (await served.http.post(PATH, json={"input": "hi", "tools": [TOOL]})).json()
    assert problems("Response", whole) == []
    assert bare(streamed["output"]) == bare(whole["output"])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "so so"}]
    assert (whole["output"][3]["name"], json.loads(whole["output"][3]["arguments"])) == ("f", {"a": 1})
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    for kind, field in (("reasoning_text", "text"), ("output_text", "text"), ("function_call_arguments", "arguments")):
        done = [event[field] for event in events if told(event) == f"{kind}.done"]
        deltas = [event["delta"] for event in events if told(event) == f"{kind}.delta"]
        assert "".join(deltas) == "".join(done) != ""


async def test_the_clients_own_stream_ends_in_the_whole_response() -> None:
    async with (
        serving(engine_of(ALL, THINKING)) as served,
        served.openai.responses.stream(model="", input="hi", tools=[TOOL]) as stream,
    ):
        final = await stream.get_final_response()
    assert final.output_text == "Right."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


async def test_forced_calls() -> None:
    async with serving(engine_of('{"a": 12}', HERMES)) as served:
        answer = await ask(served, tools=[TOOL], tool_choice={"type": "function", "name": "f"})
        (call,) = answer.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("f", '{"a": 12}')
        events = await events_of(served, tools=[TOOL], tool_choice={"type": "function", "name": "f"})
        assert "".join(event["delta"] for event in events if told(event).endswith("arguments.delta")) == '{"a": 12}'
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
        await ask(served, tools=[TOOL, TOOL | {"name": "g"}], tool_choice=allowed)
        structured = served.engine.seen[-1][1].structured_outputs
        assert structured is not None
        assert isinstance(structured.json, dict)
        assert len(structured.json["items"]["anyOf"]) == 1


async def test_a_conversation_goes_on_from_a_stored_response(served: Served) -> None:
    first = await ask(served, instructions="Once.")
    second = await ask(served, input="more", previous_response_id=first.id)
    expected = "<|open|>user: hi<|close|><|open|>assistant: Hello, world.<|close|><|open|>user: more<|close|>"
    assert prompt_of(served) == expected + "<|open|>assistant: "
    listed = await served.openai.responses.input_items.list(second.id, order="asc")
    assert [getattr(item, "role", None) for item in listed.data] == ["user", "assistant", "user"]
    raw = (await served.http.get(f"{PATH}/{second.id}/input_items", params={"limit": 1})).json()
    assert problems("ResponseItemList", raw) == []
    ResponseItemList.model_validate(raw, strict=True)
    assert raw["has_more"] is True
    rest = await served.http.get(f"{PATH}/{second.id}/input_items", params={"after": raw["last_id"]})
    assert [item["content"][0]["text"] for item in rest.json()["data"]] == ["Hello, world.", "hi"]


async def test_a_calls_output_and_references_go_to_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{{ m.reasoning_content or '' }}"
        "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.a }} {{ c.id }}){% endfor %}"
        "{{ m.tool_call_id or '' }};{% endfor %}{# <think></think> <tool_call> #}"
    )
    async with serving(engine_of("<think>hm</think>" + TWO, template)) as served:
        first = await ask(served, tools=[TOOL])
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": each.call_id, "output": "ok"} for each in calls]
        await ask(served, input=outputs, previous_response_id=first.id)
        ids = [call.call_id for call in calls]
        going_on = f"user:hi;assistant:Right.hm(f 1 {ids[0]})(f 1 {ids[1]});tool:ok{ids[0]};tool:ok{ids[1]};"
        assert prompt_of(served) == going_on
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be."}]}
        await ask(served, input=[developer, {"role": "user", "content": "hi"}, *references, *outputs])
        assert prompt_of(served) == "system:Be.;" + going_on


async def test_what_is_stored_can_be_fetched_until_it_is_deleted(served: Served) -> None:
    answer = await ask(served)
    assert (await served.openai.responses.retrieve(answer.id)).output_text == "Hello, world."
    streamed = (await events_of(served))[-1]["response"]
    assert (await served.http.get(f"{PATH}/{streamed['id']}")).json() == streamed
    deleted = await served.http.delete(f"{PATH}/{answer.id}")
    DeletedResponse.model_validate_json(deleted.content, strict=True)
    with pytest.raises(openai.NotFoundError):
        await served.openai.responses.retrieve(answer.id)
    kept = await ask(served, store=False)
    assert (await served.http.get(f"{PATH}/{kept.id}")).status_code == 404


async def test_a_response_is_its_keys_alone(engine: FakeEngine) -> None:
    async with serving(engine, ServerConfig(api_key=("one", "two"))) as served:
        mine, other = (served.openai.with_options(api_key=key) for key in ("one", "two"))
        answer = await mine.responses.create(model="", input="hi")
        assert (await mine.responses.retrieve(answer.id)).id == answer.id
        (item,) = answer.output
        for call in (
            other.responses.retrieve(answer.id),
            other.responses.delete(answer.id),
            other.responses.create(model="", input="x", previous_response_id=answer.id),
            other.responses.create(model="", input=[{"type": "item_reference", "id": str(item.id)}]),
        ):
            with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
                await call
        assert (await mine.responses.retrieve(answer.id)).id == answer.id


async def test_background_work_goes_on_without_its_client(served: Served) -> None:
    served.engine.gate.clear()
    answer = await ask(served, background=True)
    assert answer.status == "queued"
    entry = served.app.context.responses.get(answer.id, b"")
    with pytest.raises(openai.BadRequestError, match="not finished"):
        await ask(served, previous_response_id=answer.id)
    served.engine.gate.set()
    assert entry.task is not None
    await entry.task
    assert (await served.openai.responses.retrieve(answer.id)).output_text == "Hello, world."
    assert (await served.openai.responses.cancel(answer.id)).status == "completed"


async def test_a_background_stream_can_be_taken_up_again(served: Served) -> None:
    stream = await ask(served, background=True, stream=True)
    seen: list[Any] = []
    async for event in stream:  # type: ignore[attr-defined]
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()  # type: ignore[attr-defined]
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    again = await served.openai.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
    seen += [event async for event in again]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "Hello, world."


async def test_a_cancelled_response_stops_and_keeps_what_it_has(served: Served) -> None:
    served.engine.gate.clear()
    answer = await ask(served, background=True)
    cancelled = await served.openai.responses.cancel(answer.id)
    assert cancelled.status == "cancelled"
    assert served.engine.running == set()
    assert served.app.context.admission.open == 0
    served.engine.gate.set()
    plain = await ask(served)
    with pytest.raises(openai.BadRequestError, match="background"):
        await served.openai.responses.cancel(plain.id)
    await served.openai.responses.delete(answer.id)
    assert (await served.http.get(f"{PATH}/{answer.id}")).status_code == 404


async def test_a_failure_midway_is_a_failed_response_and_one_before_is_an_error(served: Served) -> None:
    served.engine.failure = EngineError("the engine failed")
    served.engine.fail_after = 3
    last = (await events_of(served))[-1]
    assert told(last) == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine failed"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert (await served.http.post(PATH, json={"input": "hi"})).status_code == 500
    served.engine.fail_after = 0
    assert (await served.http.post(PATH, json={"input": "hi", "stream": True})).status_code == 500
    answer = await ask(served, background=True)
    entry = served.app.context.responses.get(answer.id, b"")
    assert entry.task is not None
    await entry.task
    assert (await served.openai.responses.retrieve(answer.id)).status == "failed"


class Found(BaseModel):
    a: int


async def test_a_text_of_a_schema_is_constrained_and_parsed() -> None:
    async with serving(FakeEngine('{"a": 3}')) as served:
        answer = await served.openai.responses.parse(model="", input="hi", text_format=Found)
        assert answer.output_parsed == Found(a=3)
        structured = served.engine.seen[-1][1].structured_outputs
        assert structured is not None
        assert isinstance(structured.json, dict)
        assert structured.json["properties"].keys() == {"a"}


async def test_logprobs_are_those_of_the_text(served: Served) -> None:
    answer = await ask(served, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = answer.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    listed = item.content[0].logprobs or []
    assert "".join(each.token for each in listed) == "Hello, world.</s>"
    assert len(listed[0].top_logprobs) == 2
    events = await events_of(served, include=["message.output_text.logprobs"])
    assert [len(event["logprobs"]) for event in events if told(event) == "output_text.delta"] == [1] * 13
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"][0]["token"] == "H"


async def test_truncation_auto_drops_the_oldest_messages_and_nothing_more() -> None:
    roles = ["user", "assistant"] * 3 + ["user"]
    turns = [{"role": role, "content": f"{role} {index} " + "x" * 20} for index, role in enumerate(roles)]
    async with serving(FakeEngine(max_model_len=200)) as served:
        with pytest.raises(openai.BadRequestError):
            await ask(served, input=turns, instructions="Stay.", max_output_tokens=16)
        await ask(served, input=turns, instructions="Stay.", max_output_tokens=16, truncation="auto")
        prompt, _, _ = served.engine.seen[-1]
        text = prompt_of(served)
    assert text.startswith("<|open|>system: Stay.<|close|><|open|>user: user 4 ")
    assert "user 6" in text
    a_turn_more = len("user: user 2 assistant: assistant 3 ") + 2 * (20 + 2)
    assert len(prompt) + 16 <= 200 < len(prompt) + 16 + a_turn_more


@pytest.mark.parametrize("effort", ["low", "none"])
async def test_reasoning_effort_reaches_the_template(effort: str) -> None:
    template = TEMPLATE + "{{ reasoning_effort }}{{ enable_thinking is defined }}"
    async with serving(engine_of("x", template)) as served:
        await ask(served, reasoning={"effort": effort})
        assert prompt_of(served).endswith(f"{effort}{effort == 'none'}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "no"}]}, "input[0]"),
        ({"input": "x", "previous_response_id": "no"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 9999}, "max_output_tokens"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "metadata": {"a": "x" * 600}}, "metadata"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": [{"role": [], "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]}, "input[0].content[0].type"),
    ],
)
async def test_what_is_wrong_is_named_as_it_was_sent(served: Served, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = await served.http.post(PATH, json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        ErrorResponse.model_validate_json(answer.content)
        assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "after=no"])
async def test_a_wrong_query_is_named(served: Served, query: str) -> None:
    answer = await ask(served)
    found = await served.http.get(f"{PATH}/{answer.id}/input_items?{query}")
    assert (found.status_code, found.json()["error"]["param"]) == (400, query.partition("=")[0])
    streamed = await served.http.get(f"{PATH}/{answer.id}?stream=true")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


async def test_vllms_sampling_fields_are_taken_and_unknown_ones_reported(served: Served) -> None:
    answer = await served.http.post(PATH, json={"input": "hi", "top_k": 5, "seed": 3, "banana": 1})
    assert answer.headers["x-pagemill-ignored"] == "banana"
    params = served.engine.seen[-1][1]
    assert (params.top_k, params.seed) == (5, 3)


async def test_a_conversation_without_end_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MAX_CONVERSATION", 4)
    first = await ask(served, input=[{"role": "user", "content": "a"}] * 3)
    with pytest.raises(openai.BadRequestError, match="5 items; the limit is 4"):
        await ask(served, previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="begin a new one") as refused:
        await ask(served, input=[{"role": "user", "content": "a"}] * 5)
    assert refused.value.param == "input"


async def test_input_tokens_are_those_of_the_request(served: Served) -> None:
    counted = await served.http.post(f"{PATH}/input_tokens", json={"input": "hi"})
    answer = await ask(served)
    assert answer.usage is not None
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": answer.usage.input_tokens}


async def test_a_conversation_that_refers_to_one_long_item_too_often_is_refused() -> None:
    long = {"role": "user", "content": "word " * 20_000}
    async with serving(FakeEngine(max_model_len=200_000)) as served:
        made = await served.http.post("/v1/responses", json={"input": [long], "background": True})
        (item,) = (await served.http.get(f"/v1/responses/{made.json()['id']}/input_items")).json()["data"]
        answer = await served.http.post("/v1/responses", json={"input": [{"id": item["id"]}] * 100})
    assert answer.status_code == 400
    assert "4,194,304" in answer.json()["error"]["message"]


def test_leading_system_items_become_one_message() -> None:
    given = [{"role": "system", "content": text} for text in "bc"] + [{"role": "user", "content": "d"}]
    assert to_messages(read_input(given, lambda _: None), "a") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        {"role": "user", "content": "d"},
    ]
