"""POST /v1/chat/completions, through the official client where it can say what is meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill.server.answer_schemas import ChatCompletionChunk, ChatCompletionResponse
from tests.server.conftest import Served, serving
from tests.server.fake_engine import BOS, OPEN, FakeEngine

PATH = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]


def prompt_of(served: Served) -> str:
    return served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)


async def test_an_answer(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model="fake/model", messages=HI)
    assert answer.choices[0].message.content == "Hello, world."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 14
    assert prompt_of(served) == "<|open|>user: hi<|close|><|open|>assistant: "


async def test_rendered_text_gets_no_second_bos(served: Served) -> None:
    await served.http.post(PATH, json={"messages": HI})
    ids = served.engine.seen[-1][0]
    assert ids[0] == OPEN
    assert BOS not in ids


async def test_text_parts_are_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await served.http.post(PATH, json={"messages": [{"role": "user", "content": parts}]})
    assert "user: a\nb" in prompt_of(served)


async def test_the_newer_name_for_the_limit_wins(served: Served) -> None:
    body = {"messages": HI, "max_tokens": 2, "max_completion_tokens": 3}
    answer = (await served.http.post(PATH, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Hel"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_without_a_limit_it_goes_to_the_end_of_the_context() -> None:
    async with serving(FakeEngine("y" * 1000)) as served:
        answer = (await served.http.post(PATH, json={"messages": HI})).json()
    assert answer["usage"]["total_tokens"] == 512


async def test_several_answers(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model="", messages=HI, n=3, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


async def test_logprobs_without_candidates(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model="", messages=HI, logprobs=True, max_tokens=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(item.token, item.bytes, item.top_logprobs) for item in content] == [("H", [72], []), ("e", [101], [])]


async def test_logprobs_with_candidates_best_first(served: Served) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 3, "max_tokens": 1}
    answer = (await served.http.post(PATH, json=body)).json()
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [item["logprob"] for item in top] == [-0.5, -2.0, -9999.0]


async def test_a_message_is_continued(served: Served) -> None:
    messages = [*HI, {"role": "assistant", "content": "1, 2,"}]
    body: dict[str, Any] = {"messages": messages, "continue_final_message": True, "max_tokens": 3}
    plain = (await served.http.post(PATH, json=body)).json()
    assert prompt_of(served).endswith("assistant: 1, 2,")
    assert plain["choices"][0]["message"]["content"] == "Hel"
    echoed = (await served.http.post(PATH, json=body | {"echo": True})).json()
    assert echoed["choices"][0]["message"]["content"] == "1, 2,Hel"


async def test_the_turn_need_not_be_opened(served: Served) -> None:
    await served.http.post(PATH, json={"messages": HI, "add_generation_prompt": False})
    assert prompt_of(served) == "<|open|>user: hi<|close|>"


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}])
async def test_answers_fit_their_own_schema(served: Served, extra: dict[str, Any]) -> None:
    answer = await served.http.post(PATH, json={"messages": HI, **extra})
    ChatCompletionResponse.model_validate_json(answer.content, strict=True)


async def test_a_developer_is_the_system_to_a_template_that_knows_none(served: Served) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HI]
    await served.http.post(PATH, json={"messages": messages})
    assert prompt_of(served).startswith("<|open|>system: Be brief.<|close|>")
    template = "{# developer #}{% for m in messages %}{{ m.role }};{% endfor %}"
    await served.http.post(PATH, json={"messages": messages, "chat_template": template})
    assert prompt_of(served) == "developer;user;"


async def test_what_is_said_of_the_prompt_stands_beside_the_choices_of_the_first_event(served: Served) -> None:
    body = {"messages": HI, "return_token_ids": True, "prompt_logprobs": 0, "max_tokens": 2, "n": 2}
    whole = (await served.http.post(PATH, json=body)).json()
    answer = await served.http.post(PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    first, *rest = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    ChatCompletionChunk.model_validate(first, strict=True)
    assert whole["prompt_logprobs"][0] is None
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert first[name] == whole[name]
        assert not any(name in event or any(name in choice for choice in event["choices"]) for event in rest)


async def test_vllm_s_default_of_a_beam_s_parameter_is_no_mistake_without_beams(served: Served) -> None:
    body = {"messages": HI, "max_tokens": 1, "length_penalty": 1.0}
    assert (await served.http.post(PATH, json=body)).status_code == 200
    assert (await served.http.post(PATH, json=body | {"length_penalty": 2.0})).status_code == 400
