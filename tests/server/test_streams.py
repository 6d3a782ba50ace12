"""Server-sent events: what each chunk holds, in which order, and that a stream says what an unstreamed answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill.errors import EngineDeadError, NonFiniteLogitsError, PagemillError, PromptTooLongError
from tests.server.conftest import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hi", "max_tokens": 50}, CHAT: {"messages": HI}}


async def events(served: Served, path: str, **extra: Any) -> list[Any]:
    """All events of a stream, decoded; the last is "[DONE]"."""
    answer = await served.http.post(path, json=BODIES[path] | {"stream": True} | extra)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    bodies = [line.removeprefix("data: ") for line in lines]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]


def text_of(chunks: list[Any], index: int = 0) -> str:
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else []:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


async def test_a_chat_stream_is_role_text_reason_done(served: Served) -> None:
    chunks = await events(served, CHAT)
    assert chunks[-1] == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(choice["delta"]) == ["content"] for choice in choices[1:-1])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert text_of(chunks) == "Hello, world."
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks[:-1]}) == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 3, 18])
async def test_each_choice_has_exactly_one_reason(served: Served, path: str, n: int) -> None:
    chunks = (await events(served, path, n=n))[:-1]
    reasons: dict[int, list[str]] = {index: [] for index in range(n)}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                reasons[choice["index"]].append(choice["finish_reason"])
    assert reasons == {index: ["stop"] for index in range(n)}
    assert {text_of(chunks, index) for index in range(n)} == {"Hello, world."}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_unless_asked(served: Served, path: str, options: dict[str, Any] | None) -> None:
    chunks = await events(served, path, stream_options=options)
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_usage_comes_last_without_choices(served: Served, path: str) -> None:
    *chunks, last, done = await events(served, path, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_running_usage(served: Served, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await events(served, path, stream_options=options))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 14


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, None])
async def test_stream_options_need_a_stream(served: Served, path: str, stream: bool | None) -> None:
    body = BODIES[path] | {"stream": stream, "stream_options": {"include_usage": True}}
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "extra",
    [{}, {"n": 2}, {"echo": True}, {"max_tokens": 7}, {"max_tokens": 0}, {"return_token_ids": True}],
    ids=str,
)
async def test_streamed_text_is_the_unstreamed_text(served: Served, path: str, extra: dict[str, Any]) -> None:
    served.engine.script = 'Grüße 😀 "quoted" \\ \n\t\x01 \u2028 end'
    whole = (await served.http.post(path, json=BODIES[path] | extra)).json()
    chunks = await events(served, path, **extra)
    for choice in whole["choices"]:
        expected = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert text_of(chunks, choice["index"]) == expected
    assert "\ufffd" not in text_of(chunks)


async def test_streamed_completion_logprobs_are_the_unstreamed_ones(served: Served) -> None:
    served.engine.script = "Grüße 😀"
    extra: dict[str, Any] = {"logprobs": 2, "echo": True}
    whole = (await served.http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | extra)).json()["choices"][0]["logprobs"]
    chunks = (await events(served, COMPLETIONS, **extra))[:-1]
    for name, column in whole.items():
        assert [value for chunk in chunks for value in chunk["choices"][0]["logprobs"][name]] == column


async def test_streamed_chat_logprobs_are_the_unstreamed_ones(served: Served) -> None:
    served.engine.script = "Grüße 😀"
    extra: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = (await served.http.post(CHAT, json=BODIES[CHAT] | extra)).json()["choices"][0]["logprobs"]["content"]
    chunks = (await events(served, CHAT, **extra))[:-1]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [item for logprobs in found if logprobs for item in logprobs["content"]] == whole


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("error", [EngineDeadError("it went away; retry"), NonFiniteLogitsError("NaN at token 3")])
async def test_a_failure_midway_is_an_error_event_and_done(served: Served, path: str, error: PagemillError) -> None:
    served.engine.failure, served.engine.fail_after = error, 3
    chunks = await events(served, path)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["error"]["message"] == str(error)
    kind = "service_unavailable_error" if error.status == 503 else "server_error"
    assert chunks[-2]["error"]["type"] == kind
    assert text_of(chunks[:-2]) == "Hel"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_failure_before_the_first_token_is_a_plain_error(served: Served, path: str) -> None:
    served.engine.failure = PromptTooLongError("prompt too long", param="prompt")
    answer = await served.http.post(path, json=BODIES[path] | {"stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "prompt too long"


async def test_an_unforeseen_failure_says_nothing_of_its_inside(served: Served) -> None:
    served.engine.failure = RuntimeError("secret prompt")  # type: ignore[assignment]
    served.engine.fail_after = 2
    chunks = await events(served, CHAT)
    assert chunks[-2]["error"]["type"] == "server_error"
    assert "secret" not in chunks[-2]["error"]["message"]


async def test_the_official_client_reads_a_stream(served: Served) -> None:
    stream = await served.openai.chat.completions.create(
        model="", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == "Hello, world."
    assert usage is not None
    assert usage.completion_tokens == 14
