"""OpenAI's own Python client holds a conversation: synchronous, asynchronous, streamed, parsed, with tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.conftest import MODEL
from tests.server.process import ServeProcess

pytestmark = pytest.mark.slow

ASK: Any = {"model": MODEL, "max_completion_tokens": 24, "temperature": 0.7, "seed": 7}
USER: Any = [{"role": "user", "content": "Name three rivers."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Book(BaseModel):
    title: str
    kind: Literal["novel", "poem"]
    year: int


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as asking:
        yield asking


@pytest.fixture
async def aclient(server: ServeProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as asking:
        yield asking


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    turns = list(USER)
    for question in ("Which is the longest?", "Thank you."):
        answer = client.chat.completions.create(messages=turns, **ASK)
        message = answer.choices[0].message
        assert message.role == "assistant"
        assert message.content
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        turns += [message.model_dump(exclude_none=True), {"role": "user", "content": question}]
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    # The client refuses to parse what was cut at the length.
    asked = ASK | {"logprobs": True, "top_logprobs": 2, "stop": [".", "\n"], "max_completion_tokens": 1000}
    whole = client.chat.completions.create(messages=USER, **asked)
    with client.chat.completions.stream(messages=USER, **asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert deltas == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs == whole.choices[0].logprobs


def test_completions_stream_and_echo(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["One, two,", "Red, green,"], "max_tokens": 6, "temperature": 0, "n": 2}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    parts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert list(parts.values()) == [choice.text for choice in whole.choices]
    scored = client.completions.create(**asked | {"n": 1, "max_tokens": 0}, echo=True, logprobs=0)
    assert [choice.text for choice in scored.choices] == asked["prompt"]
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs[0] is None


async def test_many_at_once_and_one_that_goes_away(aclient: openai.AsyncOpenAI) -> None:
    leaving = await aclient.chat.completions.create(messages=USER, model=MODEL, stream=True, temperature=0)
    async for _ in leaving:
        break
    await leaving.close()
    answers = await asyncio.gather(
        *(aclient.chat.completions.create(messages=USER, **ASK | {"seed": seed % 4}) for seed in range(12))
    )
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[:4] == texts[4:8] == texts[8:]


async def test_an_answer_is_parsed_into_a_type(aclient: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Invent a book."}]
    answer = await aclient.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Book, max_completion_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Book)
    async with aclient.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Book, max_completion_tokens=200, temperature=0
    ) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == answer.choices[0].message.parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_tool_is_called_and_answered(client: openai.OpenAI, choice: Any) -> None:
    turns: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    asked: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": 120, "tools": [WEATHER]}
    whole = client.chat.completions.create(messages=turns, tool_choice=choice, parallel_tool_calls=False, **asked)
    with client.chat.completions.stream(
        messages=turns, tool_choice=choice, parallel_tool_calls=False, **asked
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    message = whole.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] in ("C", "F")
    assert streamed is not None
    assert streamed[0].function.arguments == call.function.arguments
    turns += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "rain, 4 C"}]
    told = client.chat.completions.create(messages=turns, tool_choice="none", **asked)
    assert told.choices[0].message.content
    assert not told.choices[0].message.tool_calls


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=USER, model=MODEL, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(messages=USER, model="another")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=MODEL, prompt="word " * 6000)


async def test_responses_are_created_continued_parsed_and_streamed(aclient: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
    first = await aclient.responses.create(input="Name a river.", **asked)
    assert first.output_text
    second = await aclient.responses.create(input="And another?", previous_response_id=first.id, **asked)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert (await aclient.responses.retrieve(first.id)).output_text == first.output_text
    async with aclient.responses.stream(input="Name a river.", **asked) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == first.output_text
    parsed = await aclient.responses.parse(
        input="Invent a book.", text_format=Book, **asked | {"max_output_tokens": 200}
    )
    assert isinstance(parsed.output_parsed, Book)
    await aclient.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await aclient.responses.retrieve(first.id)


def test_vectors_are_the_same_as_numbers_and_as_base64(embedder: ServeProcess) -> None:
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0) as asking:
        plain = asking.embeddings.create(model=MODEL, input=["a cat", "a dog"])
        numbers = asking.embeddings.create(model=MODEL, input=["a cat", "a dog"], encoding_format="float")
    for one, other in zip(plain.data, numbers.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
    assert len(plain.data[0].embedding) == 384
