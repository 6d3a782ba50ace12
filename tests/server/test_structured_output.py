"""response_format and vLLM's structured_outputs over HTTP, by the official client, the engine in its own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from pagemill.server.structured import ResponseFormat, schema_hint, with_hint
from tests.models.tiny import tiny_llama
from tests.server.process import ServeProcess, serve_process

FLAGS = ("--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "256", "--num-threads", "1")


class Verdict(BaseModel):
    """What the model is made to say."""

    model_config = ConfigDict(extra="forbid")
    mood: Literal["good", "bad"]
    sure: bool


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    with serve_process(str(folder), "--served-model-name", "tiny", *FLAGS) as served:
        yield served


@pytest.fixture
def client(running: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=60) as asking:
        yield asking


def ask(running: ServeProcess, **values: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 40, "seed": 1, **values}
    return httpx.post(running.url + "/v1/completions", json=body, timeout=60)


def test_parse_gives_an_object_of_the_callers_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        response_format=Verdict,
        temperature=0,
        max_completion_tokens=90,
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    assert answer.choices[0].finish_reason == "stop"


def no_blanks(running: ServeProcess) -> dict[str, int]:
    """A bias without which a model that knows nothing spends its tokens between those of JSON."""
    found = httpx.post(running.url + "/tokenize", json={"prompt": " \n \t\r", "add_special_tokens": False}).json()
    return {str(token): -100 for token in found["tokens"]}


def test_the_responses_api_parses_too_and_goes_on_from_what_it_stored(
    running: ServeProcess, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "text_format": Verdict}
    asked["extra_body"] = {"logit_bias": no_blanks(running)}
    first = client.responses.parse(input="hi", **asked)
    assert isinstance(first.output_parsed, Verdict)
    second = client.responses.parse(input="and", previous_response_id=first.id, **asked)
    assert isinstance(second.output_parsed, Verdict)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"guided_choice": ["positive", "negative"], "logprobs": 2}, {"positive", "negative"}),
        ({"guided_regex": "[ab]c"}, {"ac", "bc"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"structured_outputs": {"choice": ["p", "q"]}}, {"p", "q"}),
    ],
)
def test_vllms_fields_constrain_the_answer(running: ServeProcess, values: dict[str, Any], allowed: set[str]) -> None:
    answer = ask(running, **values)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in allowed


def test_a_streamed_answer_is_the_same(running: ServeProcess, client: openai.OpenAI) -> None:
    structured = {"structured_outputs": {"regex": "([a-c] ){8}"}}
    whole = ask(running, **structured).json()["choices"][0]["text"]
    stream = client.completions.create(
        model="tiny", prompt="the quick", max_tokens=40, seed=1, stream=True, extra_body=structured
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "mix"}}])
def test_a_forced_call_is_one_and_its_arguments_fit_however_the_model_is(
    running: ServeProcess, client: openai.OpenAI, choice: Any
) -> None:
    colours = {"type": "array", "items": {"$ref": "#/$defs/Colour"}, "maxItems": 2, "uniqueItems": True}
    parameters = {
        "type": "object",
        "properties": {"colours": colours},
        "required": ["colours"],
        "additionalProperties": False,
        "$defs": {"Colour": {"enum": ["red", "blue"]}},
    }
    tool: Any = {"type": "function", "function": {"name": "mix", "parameters": parameters}}
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "logit_bias": no_blanks(running),
    }
    (answer,) = client.chat.completions.create(**asked).choices
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "mix"
    assert set(json.loads(call.function.arguments)["colours"]) <= {"red", "blue"}
    streamed = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            streamed += piece.function.arguments or ""
    assert streamed == call.function.arguments


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_a_400_naming_the_keyword(running: ServeProcess, stream: bool) -> None:
    schema = {"type": "array", "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    answer = ask(running, response_format=wanted, stream=stream)
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "response_format"


def test_a_strict_function_that_cannot_be_enforced_is_the_tools_fault(running: ServeProcess) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
    nested = {"type": "function", "function": {name: tool[name] for name in ("name", "parameters", "strict")}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [nested], "tool_choice": "required"}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "hi", "tools": [tool], "tool_choice": "required"}),
    ):
        error = httpx.post(running.url + path, json=body, timeout=60).json()["error"]
        assert error["param"] == "tools"
        assert error["message"].startswith("tools: ")
        assert "uniqueItems" in error["message"]


def test_a_schema_that_is_not_strict_goes_into_the_prompt_only(running: ServeProcess) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": {"uniqueItems": True}}}
    hint = schema_hint(ResponseFormat.model_validate(wanted))
    assert hint is not None
    assert '{"uniqueItems": true}' in hint
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    assert with_hint(asked, hint) == [{"role": "user", "content": f"hi\n\n{hint}"}, asked[1]]
    assert ask(running, response_format=wanted).status_code == 200


TAG: dict[str, Any] = {
    "triggers": ["<call"],
    "structures": [{"begin": "<call>", "schema": {"type": "object", "properties": {}}, "end": "</call>"}],
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_structural_tag_may_be_the_response_format(running: ServeProcess, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "response_format": {"type": "structural_tag", **TAG}}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    assert httpx.post(running.url + path, json=body, timeout=60).status_code == 200
    body["response_format"]["triggers"] = ["<other"]
    error = httpx.post(running.url + path, json=body, timeout=60).json()["error"]
    assert error["param"] == "response_format"
    assert "begins with none" in error["message"]


def test_listed_tokens_are_reported_in_place_of_the_best(running: ServeProcess) -> None:
    best = ask(running, logprobs=3, max_tokens=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    ids = [int(name.removeprefix("token_id:")) for name in best["top_logprobs"][0]][::-1]
    values: dict[str, Any] = {"logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    listed = ask(running, **values, logprob_token_ids=ids).json()["choices"][0]["logprobs"]
    assert listed["top_logprobs"][0] == best["top_logprobs"][0]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "seed": 1}
    body |= {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": ids, "return_tokens_as_token_ids": True}
    for stream in (False, True):
        answer = httpx.post(running.url + "/v1/chat/completions", json=body | {"stream": stream}, timeout=60)
        first = answer.text.split("data: ")[2 if stream else 0]
        (item,) = json.loads(first)["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in item["top_logprobs"]] == [f"token_id:{index}" for index in ids]


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ({"allowed_token_ids": [], "bad_words": ["e"]}, "allowed_token_ids and bad_words"),
        ({"structured_outputs": {"regex": "the"}, "bad_words": ["the", "t", "th"]}, "structured_outputs and bad_words"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_forbid_every_token_are_refused_by_their_names_and_hurt_nobody(
    running: ServeProcess, limits: dict[str, Any], names: str, stream: bool
) -> None:
    prompt = list(range(10, 60))
    if "allowed_token_ids" in limits:
        asked = {"prompt": "e", "add_special_tokens": False}
        limits = limits | {"allowed_token_ids": httpx.post(running.url + "/tokenize", json=asked).json()["tokens"]}
    warm = ask(running, prompt=prompt, max_tokens=1, temperature=0).json()["choices"]
    answer = ask(running, prompt=prompt, stream=stream, **limits)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert names in error["message"]
    assert error["param"] == names.split()[0]
    again = ask(running, prompt=prompt, max_tokens=1, temperature=0).json()
    assert again["choices"] == warm
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    metrics = httpx.get(running.url + "/metrics").text.splitlines()
    assert [line.rsplit(" ", 1)[1] for line in metrics if line.startswith("vllm:corrupted_requests_total")] == ["0.0"]
