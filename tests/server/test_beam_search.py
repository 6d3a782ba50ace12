"""Beam search over HTTP: the engine's own search, in the shape of any other answer."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.config import EngineConfig
from pagemill.engine.frontend import AsyncLLM
from pagemill.engine.offline import LLM
from pagemill.params import BeamSearchParams
from tests.engine.conftest import tiny_config, tiny_model  # noqa: F401  (fixtures)
from tests.server.conftest import Served, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]


async def test_the_server_finds_what_the_offline_search_finds(tiny_config: EngineConfig) -> None:  # noqa: F811
    prompts = [[5, 6, 7, 8], [40, 41, 42] * 7]
    with LLM.from_config(tiny_config) as llm:
        expected = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5))
    engine = await AsyncLLM.start(tiny_config)
    try:
        async with serving(engine) as served:  # type: ignore[arg-type]
            body: dict[str, Any] = {"prompt": prompts, "n": 3, "max_tokens": 8, "length_penalty": 0.5}
            body |= {"use_beam_search": True, "return_token_ids": True, "logprobs": 2}
            answer = (await served.http.post(COMPLETIONS, json=body)).json()
            assert served.app.context.admission.open == 0
    finally:
        await engine.shutdown()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    found = [completion for output in expected for completion in output.outputs]
    assert [choice["token_ids"] for choice in answer["choices"]] == [each.token_ids for each in found]
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in found]
    for choice, each in zip(answer["choices"], found, strict=True):
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(each.cumulative_logprob, abs=1e-4)


async def test_chats_are_searched_too(served: Served) -> None:
    body = {"messages": HI, "n": 2, "max_tokens": 3, "use_beam_search": True, "temperature": 0.7}
    answer = (await served.http.post(CHAT, json=body)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["HHH", "HHJ"]
    assert answer["usage"]["completion_tokens"] == 6
    assert all(len(prompt) < 60 for prompt, _, _ in served.engine.seen)


@pytest.mark.parametrize(("skips", "texts"), [(None, ["", "J"]), (True, ["", "J"]), (False, ["HHH", "HHJ"])])
async def test_special_tokens_are_shown_where_that_is_asked_for(
    served: Served, monkeypatch: pytest.MonkeyPatch, skips: bool | None, texts: list[str]
) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "special_ids", frozenset(b"H"), raising=False)
    body = {"prompt": "a", "n": 2, "max_tokens": 3, "use_beam_search": True, "skip_special_tokens": skips}
    answer = (await served.http.post(COMPLETIONS, json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == texts


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        (COMPLETIONS, {"stream": True}, "stream"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"stop": ["x"]}, "stop"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"repetition_penalty": 1.5}, "repetition_penalty"),
        (COMPLETIONS, {"guided_regex": "a"}, "guided_regex"),
        (COMPLETIONS, {"n": 20}, "n"),
        (COMPLETIONS, {"length_penalty": 50}, "length_penalty"),
        (COMPLETIONS, {"max_tokens": 9999}, "max_tokens"),
        (COMPLETIONS, {"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_beams_cannot_do_is_refused_by_name(
    served: Served, path: str, values: dict[str, Any], param: str
) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    answer = await served.http.post(path, json={**body, "use_beam_search": True, **values})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
