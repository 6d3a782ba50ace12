"""Streamed or whole, an answer is the same bytes, whatever the parameters: text, reasons, logprobs, ids and usage."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagemill.models.sources import ModelSource
from tests.server.process import ServeProcess, serve_process

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_SETS = 200
NUM_ALWAYS = 16
TIMEOUT_S = 1200
"""Only a bound on a hang."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA | {"required": ["name"]}}}]


@pytest.fixture(scope="module")
def embedded(embedded_source: ModelSource) -> Iterator[ServeProcess]:
    with serve_process("--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "256") as running:
        yield running


def numbers() -> list[Any]:
    """The first few always, all of them among the slow tests."""
    return [pytest.param(number, marks=[] if number < NUM_ALWAYS else pytest.mark.slow) for number in range(NUM_SETS)]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("number", numbers())
def test_a_stream_says_what_the_whole_answer_says(embedded: ServeProcess, number: int) -> None:
    path, body = asked(number)
    with httpx.Client(base_url=embedded.url, timeout=TIMEOUT_S) as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        events = http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}}).text
    whole = answer.json()
    assert whole["usage"]["prompt_tokens"] > 0
    expected = {choice["index"]: shown(path, choice) for choice in whole["choices"]}
    found, usage = folded(path, events)
    assert found == expected, body
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name], body


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_the_prompt_s_logprobs_whatever_the_prompt_s_chunks(embedded: ServeProcess, path: str) -> None:
    rng = random.Random(5)
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "n": 2, "prompt_logprobs": 1}
    if path == COMPLETIONS:
        body |= {"prompt": [rng.randrange(100, 40000) for _ in range(900)], "echo": True, "logprobs": 1}
    else:
        words = rng.choices(["cat", "dog", "house", "tree"], k=900)
        body |= {"messages": [{"role": "user", "content": " ".join(words)}]}
    with httpx.Client(base_url=embedded.url, timeout=TIMEOUT_S) as http:
        whole = http.post(path, json=body).json()
        events = http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}}).text
    assert folded(path, events)[0] == {choice["index"]: shown(path, choice) for choice in whole["choices"]}
    told = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event.startswith("data: {")]
    if path == COMPLETIONS:
        expected = {choice["index"]: choice["prompt_logprobs"] for choice in whole["choices"]}
        given = [choice for event in told for choice in event["choices"] if "prompt_logprobs" in choice]
        assert {choice["index"]: choice["prompt_logprobs"] for choice in given} == expected
        assert len(given) == 2
    else:
        assert [event["prompt_logprobs"] for event in told if "prompt_logprobs" in event] == [whole["prompt_logprobs"]]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("number", numbers()[::4])
def test_a_stream_of_events_ends_in_the_whole_response(embedded: ServeProcess, number: int) -> None:
    _, body = asked(number)
    rng = random.Random(number)
    names = ("top_p", "temperature", "seed", "top_k", "min_p", "stop", "logit_bias", "repetition_penalty", "bad_words")
    body = {name: body[name] for name in names if name in body}
    body |= {"input": rng.choice(["Say something.", "Grüße 🙂!"]), "max_output_tokens": rng.randint(1, 40)}
    if rng.random() < 0.4:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": rng.choice([0, 3])}
    kind = rng.random()
    if kind < 0.3:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    elif kind < 0.6:
        body |= {
            "tools": [{"type": "function", **TOOLS[0]["function"]}],
            "tool_choice": rng.choice(["auto", "required"]),
        }
    with httpx.Client(base_url=embedded.url, timeout=TIMEOUT_S) as http:
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        events = http.post("/v1/responses", json=body | {"stream": True}).text
    told = [json.loads(event.split("data: ", 1)[1]) for event in events.split("\n\n") if event]
    assert lasting(told[-1]["response"]) == lasting(answer.json()), body
    for kind_of, field in (("output_text", "text"), ("function_call_arguments", "arguments")):
        deltas = [event["delta"] for event in told if event["type"] == f"response.{kind_of}.delta"]
        done = [event[field] for event in told if event["type"] == f"response.{kind_of}.done"]
        assert "".join(deltas) == "".join(done), body


def lasting(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is new each time."""
    drawn = ("id", "call_id", "created_at", "completed_at")
    bare = {name: value for name, value in response.items() if name not in drawn}
    bare["output"] = [{name: item[name] for name in item if name not in drawn} for item in response["output"]]
    bare["usage"] = {name: response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    return bare


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """A path and a body; the same number always asks the same."""
    rng = random.Random(number)
    chat = rng.random() < 0.5
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.randint(0, 1 << 31)}
    body["temperature"] = rng.choice([0, 0, 0.3, 1, 1.7])
    optional: dict[str, list[Any]] = {
        "n": [1, 2, 3],
        "top_p": [0.1, 0.9],
        "top_k": [1, 5, 40],
        "min_p": [0.05, 0.5],
        "presence_penalty": [-1, 1.5],
        "frequency_penalty": [-0.5, 2],
        "repetition_penalty": [0.9, 1.3],
        "min_tokens": [1, 5],
        "stop": ["e", [" the", "\n"], ["."]],
        "include_stop_str_in_output": [True],
        "ignore_eos": [True],
        "skip_special_tokens": [False],
        "spaces_between_special_tokens": [False],
        "stop_token_ids": [[30, 281], [11]],
        "logit_bias": [{"30": 5, "40": -100}],
        "bad_words": [["the"]],
        "return_token_ids": [True],
        "truncate_prompt_tokens": [4],
    }
    for name, values in optional.items():
        if rng.random() < 0.25:
            body[name] = rng.choice(values)
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    if chat:
        return CHAT, body | _chat_fields(rng)
    return COMPLETIONS, body | _completion_fields(rng)


def _chat_fields(rng: random.Random) -> dict[str, Any]:
    words = ["Say something.", "Grüße, 日本 🙂!", "Write a list of three things that are round, and one that is not."]
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": rng.choice(words)}]}
    if rng.random() < 0.3:
        fields["messages"].insert(0, {"role": "system", "content": "You are brief."})
    if rng.random() < 0.4:
        fields |= {"logprobs": True, "top_logprobs": rng.choice([0, 1, 5])}
    kind = rng.random()
    if kind < 0.15:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    elif kind < 0.3:
        fields |= {"tools": TOOLS, "tool_choice": rng.choice(["auto", "required"])}
    elif kind < 0.4:
        fields["messages"].append({"role": "assistant", "content": "Once upon"})
        fields |= {"continue_final_message": True, "echo": True}
    return fields


def _completion_fields(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt": rng.choice(["Once upon a time", "日本の 🙂", ["One, two,", "Rot, grün,"], [30, 31, 32, 33]])
    }
    if rng.random() < 0.4:
        fields["logprobs"] = rng.choice([0, 1, 5])
    if rng.random() < 0.3:
        fields["echo"] = True
    if rng.random() < 0.15:
        fields["structured_outputs"] = {"regex": "[a-z ]{1,30}"}
    return fields


def shown(path: str, choice: dict[str, Any]) -> dict[str, Any]:
    """What of a whole answer's choice a stream says too."""
    said: dict[str, Any] = {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    said["token_ids"] = choice.get("token_ids", [])
    if path == COMPLETIONS:
        return said | {"text": choice["text"], "logprobs": choice["logprobs"] or {}, "calls": []}
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    logprobs = {"content": choice["logprobs"]["content"]} if choice["logprobs"] else {}
    return said | {"text": message["content"] or "", "logprobs": logprobs, "calls": calls}


def folded(path: str, events: str) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The choices of a stream put together, and its usage."""
    found: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    lines = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    for event in map(json.loads, lines):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            said = found.setdefault(
                choice["index"],
                {"finish_reason": None, "stop_reason": None, "token_ids": [], "text": "", "logprobs": {}, "calls": []},
            )
            _add(path, said, choice)
    for said in found.values():
        said["calls"] = [(name, arguments) for name, arguments in said["calls"]]
    return found, usage


def _add(path: str, said: dict[str, Any], choice: dict[str, Any]) -> None:
    assert said["finish_reason"] is None, "more after the end"
    said["finish_reason"] = choice["finish_reason"]
    said["stop_reason"] = choice.get("stop_reason")
    said["token_ids"] += choice.get("token_ids") or []
    for name, column in (choice["logprobs"] or {}).items():
        if column is not None:
            said["logprobs"][name] = said["logprobs"].get(name, []) + column
    if path == COMPLETIONS:
        said["text"] += choice["text"]
        return
    said["text"] += choice["delta"].get("content") or ""
    for call in choice["delta"].get("tool_calls") or []:
        if call["index"] == len(said["calls"]):
            said["calls"].append([call["function"]["name"], ""])
        said["calls"][call["index"]][1] += call["function"].get("arguments") or ""
