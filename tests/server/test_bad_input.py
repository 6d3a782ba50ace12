"""What a caller may get wrong: each is one line in OpenAI's format, and the next request is served."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from pagemill.config import ServerConfig
from pagemill.server.answer_schemas import ErrorResponse
from tests.server.conftest import Served, serving
from tests.server.fake_engine import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hi"}, CHAT: {"messages": HI}}


async def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    ErrorResponse.model_validate_json(answer.content, strict=True)
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"]
    assert (await served.http.post(COMPLETIONS, json={"prompt": "next"})).status_code == 200
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", "hot", "a number"),
        ("temperature", -1, "between 0 and 2"),
        ("temperature", 50, "between 0 and 2"),
        ("temperature", True, "a number"),
        ("top_p", 0, "more than 0"),
        ("top_p", 1.5, "at most 1"),
        ("min_p", 2, "at most 1"),
        ("top_k", -2, "between -1"),
        ("n", 0, "between 1 and 128"),
        ("n", 1000, "between 1 and 128"),
        ("n", 1.5, "an integer"),
        ("n", "2", "an integer"),
        ("max_tokens", -1, "between 0"),
        ("max_tokens", 2**40, "between 0"),
        ("min_tokens", -1, "between 0"),
        ("presence_penalty", 3, "at most 2"),
        ("repetition_penalty", 0, "at least 1e-06"),
        ("repetition_penalty", 1e300, "at most 1e+06"),
        ("repetition_penalty", 1e-300, "at least 1e-06"),
        ("seed", 2**70, "seed"),
        ("stop", 5, "a string or a list"),
        ("stop", [""], "non-empty"),
        ("stop", [1], "a string"),
        ("stop_token_ids", [-1], "greater than or equal to 0"),
        ("stop_token_ids", "x", "a list"),
        ("logit_bias", {"not a number": -100}, "token ids"),
        ("logit_bias", {"5": 101}, "at most 100"),
        ("logit_bias", [1], "an object"),
        ("allowed_token_ids", [], "empty"),
        ("bad_words", [""], "non-empty"),
        ("prompt_logprobs", 21, "between 0 and 20"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("truncate_prompt_tokens", -2, "between -1"),
        ("truncation_side", "middle", "left, right"),
        ("thinking_token_budget", 5, "not supported"),
        ("repetition_detection", {"max_pattern_size": 3}, "not supported"),
        ("stream", "yes", "true or false"),
        ("cache_salt", "", "at least 1 character"),
        ("request_id", "a b", "pattern"),
        ("request_id", "x" * 200, "at most 128"),
        ("model", 5, "a string"),
    ],
)
async def test_a_wrong_value_names_itself_and_the_limit(
    served: Served, path: str, field: str, value: Any, words: str
) -> None:
    error = await refused(served, path, BODIES[path] | {field: value})
    assert error["param"].split(".")[0] == field
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None
    assert words in error["message"]
    assert field in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"prompt": "a", "logprobs": 25}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprob_token_ids": [65]}, "logprob_token_ids"),
        ({"prompt": "a", "logprobs": 1, "logprob_token_ids": [65] * 21}, "logprob_token_ids"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": "a", "guided_choice": []}, "guided_choice"),
        ({"prompt": "a", "guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"prompt": "a", "structured_outputs": {"jsons": "{}"}}, "structured_outputs"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": "a", "response_format": {"type": "structural_tag"}}, "response_format"),
    ],
)
async def test_a_wrong_completion(served: Served, body: dict[str, Any], param: str) -> None:
    error = await refused(served, COMPLETIONS, body)
    assert error["param"].startswith(param.split(".")[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": HI, "logprob_token_ids": [65]}, "logprob_token_ids"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HI, "logprobs": 3}, "logprobs"),
        ({"messages": HI, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_a_wrong_chat(served: Served, body: dict[str, Any], param: str) -> None:
    assert (await refused(served, CHAT, body))["param"] == param


async def test_an_infinite_number_is_named(served: Served) -> None:
    answer = await served.http.post(COMPLETIONS, content=b'{"prompt": "a", "max_tokens": 1e400}')
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("max_tokens=Infinity is not valid; it must be ")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cache_salt", "", "it must be a string with at least 1 character"),
        ("request_id", "x" * 200, "it must be a string with at most 128 characters"),
        ("request_id", "a b", "it must be a string that matches the pattern '"),
        ("stop", [1], "it must be a string or a list of strings"),
        (
            "prompt",
            [-1],
            "it must be a string or a list of integers of at least 0 or a list of strings or a list of lists of",
        ),
        ("prompt", [1, 2**31], "a list of integers of at most 2147483647"),
    ],
)
async def test_what_a_value_must_be_reads_as_a_sentence(served: Served, field: str, value: Any, words: str) -> None:
    error = await refused(served, COMPLETIONS, BODIES[COMPLETIONS] | {field: value})
    assert words in error["message"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "text"}, "messages[0].content[0].text is missing; a part of type 'text' needs it as a string"),
        ({"type": "text", "text": 5}, "messages[0].content[0].text is a int; a part of type 'text' needs it"),
        ({"type": "image_url", "text": "x"}, "only text parts are understood"),
    ],
)
async def test_a_part_without_its_text_says_what_it_lacks(served: Served, part: dict[str, Any], words: str) -> None:
    error = await refused(served, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert words in error["message"]
    assert error["param"] == "messages[0].content[0]"


async def test_a_broken_template_of_a_request_is_not_said_to_be_the_server_s(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    error = await refused(served, CHAT, {"messages": HI, "chat_template": "{% if"})
    assert "does not compile" in error["message"]
    assert error["param"] == "chat_template"
    assert "does not compile" not in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}'])
async def test_a_body_that_is_no_object(served: Served, content: bytes) -> None:
    answer = await served.http.post(COMPLETIONS, content=content)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"] or "prompt" in answer.json()["error"]["message"]


async def test_the_official_client_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await served.openai.completions.create(model="", prompt="a", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.openai.completions.create(model="nope", prompt="a")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_unknown_model_is_404(served: Served, path: str) -> None:
    error = await refused(served, path, BODIES[path] | {"model": "nope"}, 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "fake/model" in error["message"]


async def test_a_prompt_longer_than_the_context_says_the_numbers(served: Served) -> None:
    error = await refused(served, COMPLETIONS, {"prompt": "a" * 600})
    assert "601" in error["message"]
    assert "512" in error["message"]


FAR_TOO_LONG = "a" * (512 * 9 + 1)
"""The fake's longest token has 9 characters."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": FAR_TOO_LONG}),
        (COMPLETIONS, {"prompt": ["a", FAR_TOO_LONG]}),
        (CHAT, {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}),
        ("/v1/responses", {"input": FAR_TOO_LONG}),
    ],
)
async def test_a_text_far_beyond_the_context_is_refused_before_it_is_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    encode, lengths = served.engine.tokenizer.encode, []

    def noting(text: str, *, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(served.engine.tokenizer, "encode", noting)
    error = await refused(served, path, body)
    assert max(lengths) < 100  # of the request after it
    assert error["code"] == "context_length_exceeded"
    assert re.search(r"which are 5[12]\d tokens or more", error["message"])
    assert "512" in error["message"]


async def test_a_text_far_beyond_the_context_is_taken_where_it_is_cut(served: Served) -> None:
    cut = {"prompt": FAR_TOO_LONG, "truncate_prompt_tokens": 5, "max_tokens": 1}
    answer = await served.http.post(COMPLETIONS, json=cut)
    assert answer.json()["usage"]["prompt_tokens"] == 5
    items = [{"role": "user", "content": FAR_TOO_LONG}, {"role": "user", "content": "b"}]
    shortened = {"input": items, "truncation": "auto", "max_output_tokens": 16}
    assert (await served.http.post("/v1/responses", json=shortened)).status_code == 200


async def test_unknown_paths_and_methods(served: Served) -> None:
    missing = await served.http.get("/v2/nothing")
    assert missing.status_code == 404
    assert "/v2/nothing" in missing.json()["error"]["message"]
    wrong = await served.http.get(COMPLETIONS)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "POST" in wrong.json()["error"]["message"]


async def test_a_template_that_raises(served: Served) -> None:
    template = "{{ raise_exception('only user and assistant roles are supported') }}"
    served.app.context.use_template(template)
    answer = await served.http.post(CHAT, json=BODIES[CHAT])
    own = await served.http.post(CHAT, json=BODIES[CHAT] | {"chat_template": template})
    assert own.json() == answer.json()
    assert answer.status_code == 400
    assert "only user and assistant roles" in answer.json()["error"]["message"]


async def test_a_template_that_renders_to_nothing(served: Served) -> None:
    served.app.context.use_template("{% if false %}x{% endif %}")
    answer = await served.http.post(CHAT, json=BODIES[CHAT])
    assert answer.status_code == 400
    assert "cannot be empty" in answer.json()["error"]["message"]


async def test_a_model_without_a_template(served: Served) -> None:
    served.app.context.chat_template = None
    answer = await served.http.post(CHAT, json=BODIES[CHAT])
    assert answer.status_code == 400
    assert "--chat-template" in answer.json()["error"]["message"]


@pytest.fixture
async def narrow() -> AsyncIterator[Served]:
    async with serving(FakeEngine(), ServerConfig(max_body_bytes=2048)) as served:
        yield served


async def test_an_over_long_body_is_413(narrow: Served) -> None:
    answer = await narrow.http.post(COMPLETIONS, json={"prompt": "a" * 3000})
    assert answer.status_code == 413
    assert "2048" in answer.json()["error"]["message"]
    assert (await narrow.http.post(COMPLETIONS, json={"prompt": "a" * 200})).status_code == 200


async def test_an_over_long_body_of_unknown_length_is_413_while_it_is_read(narrow: Served) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 3 << 20:
            sent += 1024
            yield b"a" * 1024

    answer = await narrow.http.post(COMPLETIONS, content=endless())
    assert answer.status_code == 413


async def test_a_body_of_exactly_the_limit_is_read(narrow: Served) -> None:
    shell = len(b'{"prompt":""}')
    body = b'{"prompt":"' + b"a" * (2048 - shell) + b'"}'
    answer = await narrow.http.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    assert "512" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-0.1", "2.1"])
async def test_every_temperature_that_is_refused_is_refused_with_the_same_limit(served: Served, value: str) -> None:
    answer = await served.http.post(COMPLETIONS, content=f'{{"prompt": "a", "temperature": {value}}}')
    assert answer.status_code == 400
    assert "it must be between 0 and 2" in answer.json()["error"]["message"]
