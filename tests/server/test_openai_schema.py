"""Every body and every event is what OpenAI's published description says (those of /v1/responses: test_responses)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill.config import ServerConfig
from pagemill.errors import EngineError
from pagemill.server.answer_schemas import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionChunk,
    CompletionResponse,
)
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine
from tests.server.openai_spec import problems
from tests.server.test_tools import HI, LISTED, NAMED, THINKING, TOOLS, TWO, engine_of

ALL = f"<think>so</think>{TWO}"
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("Hello", {}),
    ("", {}),
    ("Hello", {"n": 3, "logprobs": True, "top_logprobs": 3}),
    ("Hello", {"max_tokens": 2}),
    ("Hello", {"max_tokens": 0}),
    ("é€😀", {"logprobs": True}),
    (ALL, {}),
    (ALL, {"tools": TOOLS, "logprobs": True}),
    (ALL, {"tools": TOOLS, "n": 2, "include_reasoning": False}),
    (LISTED, {"tools": TOOLS, "tool_choice": "required"}),
    ('{"a": 1}', {"tools": TOOLS, "tool_choice": NAMED}),
    ("Hello", {"return_token_ids": True, "prompt_logprobs": 1, "stop": "l"}),
]
TEXTS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": 3},
    {"echo": True, "logprobs": 1, "max_tokens": 2},
    {"echo": True, "max_tokens": 0},
    {"prompt": [[65, 66], [67]], "best_of": 2},
    {"return_token_ids": True, "prompt_logprobs": 1, "stop": ["l", "x"]},
]
OPTIONS = ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True})


async def chunks_of(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await served.http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(("script", "body"), CHATS)
async def test_chat(script: str, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    async with serving(engine_of(script, THINKING)) as served:
        whole = await served.http.post(path, json={"messages": HI, **body})
        assert problems("CreateChatCompletionResponse", whole.json()) == []
        ChatCompletionResponse.model_validate_json(whole.content, strict=True)
        for options in OPTIONS:
            chunks = await chunks_of(served, path, {"messages": HI, "stream_options": options, **body})
            for chunk in chunks:
                assert problems("CreateChatCompletionStreamResponse", chunk) == []
                ChatCompletionChunk.model_validate(chunk, strict=True)
            assert (chunks[-1]["choices"] == []) == bool(options)


@pytest.mark.parametrize("body", TEXTS)
async def test_completions(served: Served, body: dict[str, Any]) -> None:
    path = "/v1/completions"
    whole = await served.http.post(path, json={"prompt": "ab", **body})
    assert problems("CreateCompletionResponse", whole.json()) == []
    CompletionResponse.model_validate_json(whole.content, strict=True)
    body = {name: value for name, value in body.items() if name != "best_of"}
    for options in OPTIONS:
        for chunk in await chunks_of(served, path, {"prompt": "ab", "stream_options": options, **body}):
            assert problems("CreateCompletionResponse", chunk) == []
            CompletionChunk.model_validate(chunk, strict=True)


async def test_models(served: Served) -> None:
    assert problems("ListModelsResponse", (await served.http.get("/v1/models")).json()) == []
    assert problems("Model", (await served.http.get("/v1/models/fake/model")).json()) == []


async def test_errors_whatever_they_are_about(engine: FakeEngine) -> None:
    chat = "/v1/chat/completions"
    async with serving(engine, ServerConfig(api_key=("k",), max_num_queued_reqs=4)) as served:
        served.http.headers["authorization"] = "Bearer k"
        refused = [
            await served.http.get("/v1/models", headers={"authorization": "Bearer x"}),
            await served.http.get("/v1/nothing"),
            await served.http.get("/v1/models/nothing"),
            await served.http.get("/v1/responses/nothing"),
            await served.http.put(chat),
            await served.http.post(chat, content=b"{"),
            await served.http.post(chat, json={"messages": HI, "model": "x"}),
            await served.http.post(chat, json={"messages": HI, "temperature": -1}),
            await served.http.post(chat, json={"messages": HI, "max_tokens": 9999}),
            await served.http.post(chat, json={"messages": HI, "n": 100}),
            await served.http.post(chat, content=b" " * 5_000_000),
        ]
        served.engine.state.alive = False
        refused.append(await served.http.post(chat, json={"messages": HI}))
        refused.append(await served.http.get("/health"))
    codes = [answer.status_code for answer in refused]
    assert codes == [401, 404, 404, 404, 405, 400, 404, 400, 400, 400, 413, 503, 503]
    for answer in refused:
        assert problems("ErrorResponse", answer.json()) == []
    assert [answer.json()["error"]["code"] for answer in refused[:4]] == [
        "invalid_api_key",
        "not_found",
        "model_not_found",
        "not_found",
    ]
    assert refused[8].json()["error"]["code"] == "context_length_exceeded"


async def test_an_error_within_a_stream(served: Served) -> None:
    served.engine.failure = EngineError("broken")
    served.engine.fail_after = 2
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HI})):
        *_, last = await chunks_of(served, path, body)
        assert problems("ErrorResponse", last) == []


def test_what_does_not_fit_is_found() -> None:
    assert problems("ErrorResponse", {"error": {"message": "", "type": "", "param": None, "code": 400}})
    assert problems("ResponseStreamEvent", {"type": "response.created", "sequence_number": 0})
