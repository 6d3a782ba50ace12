"""POST /v1/completions, through the official client where it can say what is meant."""

from __future__ import annotations

import asyncio

import pytest

from pagemill.config import ServerConfig
from pagemill.server.answer_schemas import CompletionResponse
from tests.server.conftest import Served, serving
from tests.server.fake_engine import BOS, FakeEngine

PATH = "/v1/completions"


async def test_text_prompt(served: Served) -> None:
    answer = await served.openai.completions.create(model="fake/model", prompt="Say", max_tokens=5)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 5, 9)
    assert answer.id.startswith("cmpl-")


async def test_it_ends_at_the_end_of_text(served: Served) -> None:
    answer = await served.openai.completions.create(model="", prompt="Say", max_tokens=100)
    assert answer.choices[0].text == "Hello, world."
    assert answer.choices[0].finish_reason == "stop"


async def test_default_is_sixteen_tokens_and_null_is_the_whole_context() -> None:
    async with serving(FakeEngine("x" * 1000)) as served:
        short = (await served.http.post(PATH, json={"prompt": "a"})).json()
        long = (await served.http.post(PATH, json={"prompt": "a", "max_tokens": None})).json()
    assert short["usage"]["completion_tokens"] == 16
    assert long["usage"]["total_tokens"] == 512


@pytest.mark.parametrize("name", ["", None, "fake/model"])
async def test_the_served_name_is_echoed_whatever_default_was_asked_for(served: Served, name: str | None) -> None:
    answer = (await served.http.post(PATH, json={"model": name, "prompt": "a"})).json()
    assert answer["model"] == "fake/model"


async def test_token_ids_are_taken_as_they_are(served: Served) -> None:
    await served.openai.completions.create(model="", prompt=[104, 105])
    assert served.engine.seen[-1][0] == [104, 105]


async def test_text_gets_a_bos_unless_told_otherwise(served: Served) -> None:
    await served.http.post(PATH, json={"prompt": "hi"})
    await served.http.post(PATH, json={"prompt": "hi", "add_special_tokens": False})
    assert [seen[0] for seen in served.engine.seen] == [[BOS, 104, 105], [104, 105]]


async def test_a_list_of_prompts_has_choices_in_its_order(served: Served) -> None:
    body = {"prompt": ["one", "three"], "n": 2, "max_tokens": 3, "echo": True}
    answer = (await served.http.post(PATH, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["oneHel", "oneHel", "threeHel", "threeHel"]
    assert answer["usage"]["prompt_tokens"] == 4 + 6
    assert answer["usage"]["completion_tokens"] == 12


async def test_a_list_of_token_lists(served: Served) -> None:
    answer = (await served.http.post(PATH, json={"prompt": [[104], [105, 106]], "echo": True, "max_tokens": 1})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hH", "ijH"]


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_summed_over_the_prompts(served: Served, stream: bool) -> None:
    body = {"prompt": ["a" * 20, "b" * 40], "max_tokens": 1, "stream": stream}
    if not stream:
        usage = (await served.http.post(PATH, json=body)).json()["usage"]
    else:
        chunks = await served.openai.completions.create(
            model="", prompt=["a" * 20, "b" * 40], max_tokens=1, stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk async for chunk in chunks][-1].model_dump()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16 + 32
    assert usage["prompt_tokens"] == 21 + 41


async def test_logprob_columns_join_to_the_text(served: Served) -> None:
    served.engine.script = "Grüße 😀!"
    answer = await served.openai.completions.create(
        model="", prompt="\n1. é", echo=True, logprobs=1, max_tokens=50, extra_body={"seed": 7}
    )
    choice = answer.choices[0]
    columns = choice.logprobs
    assert columns is not None
    assert columns.tokens is not None
    assert columns.text_offset is not None
    assert columns.token_logprobs is not None
    assert "".join(columns.tokens) == choice.text == "\n1. éGrüße 😀!"
    ends = 0
    for token, offset in zip(columns.tokens, columns.text_offset, strict=True):
        assert offset == ends
        ends += len(token)
    assert columns.token_logprobs[0] is None
    assert all(value is not None for value in columns.token_logprobs[1:])


async def test_echo_without_output(served: Served) -> None:
    body = {"prompt": "any text", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await served.http.post(PATH, json=body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "any text"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 9
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


async def test_minus_infinity_is_a_number_in_json(served: Served) -> None:
    body = {"prompt": "any", "echo": True, "logprobs": 3, "top_k": 1, "max_tokens": 2}
    answer = (await served.http.post(PATH, json=body)).json()
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert min(value for top in tops if top for value in top.values()) == -9999.0


async def test_prompt_logprobs_come_by_token_id(served: Served) -> None:
    answer = (await served.http.post(PATH, json={"prompt": [65, 66], "prompt_logprobs": 1})).json()
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["66"] == {"logprob": -0.5, "rank": 1, "decoded_token": "B"}


async def test_best_of_returns_the_most_probable(served: Served) -> None:
    answer = (await served.http.post(PATH, json={"prompt": "a", "n": 2, "best_of": 5, "max_tokens": 4})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert served.engine.seen[-1][1].n == 5
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["choices"][0]["logprobs"] is None


async def test_token_ids_on_request(served: Served) -> None:
    answer = (await served.http.post(PATH, json={"prompt": [65], "max_tokens": 2, "return_token_ids": True})).json()
    assert answer["choices"][0]["token_ids"] == [72, 101]
    assert answer["choices"][0]["prompt_token_ids"] == [65]


async def test_every_sampling_parameter_reaches_the_engine(served: Served) -> None:
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.5,
        "seed": 42,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "logit_bias": {"5": -100},
        "allowed_token_ids": [1, 2, 3],
        "bad_words": ["bad"],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 4,
        "max_tokens": 7,
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    answer = await served.http.post(PATH, json={"prompt": "0123456789", **wanted})
    assert answer.status_code == 200
    params = served.engine.seen[-1][1]
    for name, value in wanted.items():
        expected = {5: -100.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected, name


async def test_the_models_own_defaults_hold_where_a_request_says_nothing() -> None:
    engine = FakeEngine()
    engine.text.defaults = {"temperature": 0.6, "top_p": 0.9}
    async with serving(engine) as served:
        await served.http.post(PATH, json={"prompt": "a", "top_p": 0.5})
    assert (engine.seen[-1][1].temperature, engine.seen[-1][1].top_p) == (0.6, 0.5)


async def test_defaults_out_of_bounds_are_passed_over() -> None:
    engine = FakeEngine()
    engine.text.defaults = {"temperature": -3}
    async with serving(engine) as served:
        assert (await served.http.post(PATH, json={"prompt": "a"})).status_code == 200
    assert engine.seen[-1][1].temperature == 1.0


async def test_unknown_fields_are_named_in_a_header_and_otherwise_ignored(served: Served) -> None:
    answer = await served.http.post(PATH, json={"prompt": "a", "frobnicate": 1, "bad\nname": 2, "store": True})
    assert answer.status_code == 200
    assert answer.headers["x-pagemill-ignored"] == "frobnicate, badname"


async def test_two_requests_with_one_id_both_finish(served: Served) -> None:
    body = {"prompt": "a", "request_id": "mine", "max_tokens": 1}
    ids = [(await served.http.post(PATH, json=body)).json()["id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(name.startswith("cmpl-mine-") for name in ids)


async def test_answers_fit_their_own_schema(served: Served) -> None:
    body = {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "prompt_logprobs": 1, "return_token_ids": True}
    answer = await served.http.post(PATH, json=body)
    CompletionResponse.model_validate_json(answer.content, strict=True)


async def test_many_prompts_are_queued_a_bounded_number_a_turn_of_the_loop(served: Served) -> None:
    served.engine.gate.clear()
    body = {"prompt": [[65]] * 300, "n": 2, "max_tokens": 1}
    asked = asyncio.create_task(served.http.post(PATH, json=body))
    before, most = 0, 0
    while before < 300:
        await asyncio.sleep(0)
        now = len(served.engine.seen)
        before, most = now, max(most, now - before)
    served.engine.gate.set()
    assert most == 32  # 64 sequences
    assert len((await asked).json()["choices"]) == 600


async def test_prompts_of_one_request_are_queued_together_or_not_at_all(served: Served) -> None:
    served.engine.max_num_queued_tokens = 10
    refused = await served.http.post(PATH, json={"prompt": ["aaaa", "bbbb", "cccc"], "max_tokens": 2})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "15 prompt tokens" in refused.json()["error"]["message"]
    assert not served.engine.seen
    assert served.app.context.admission.open == 0
    taken = await served.http.post(PATH, json={"prompt": ["aaaa", "bbbb"], "max_tokens": 2})
    assert taken.status_code == 200
    cut = {"prompt": ["aaaa", "bbbb", "cccc"], "max_tokens": 2, "truncate_prompt_tokens": 3}
    assert (await served.http.post(PATH, json=cut)).status_code == 200


@pytest.mark.parametrize(("field", "flag"), [(True, False), (None, True)])
async def test_tokens_are_named_by_their_ids_where_that_is_asked_for(field: bool | None, flag: bool) -> None:
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": field}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    async with serving(FakeEngine(), ServerConfig(return_tokens_as_token_ids=flag)) as served:
        logprobs = (await served.http.post(PATH, json=body)).json()["choices"][0]["logprobs"]
        answer = await served.http.post("/v1/chat/completions", json=chat | {"return_tokens_as_token_ids": field})
    assert logprobs["tokens"] == ["token_id:72", "token_id:101"]
    assert logprobs["text_offset"] == [1, 2] or logprobs["text_offset"] == [0, 1]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    (item,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert (item["token"], item["bytes"]) == ("token_id:72", [72])
    assert item["top_logprobs"][0]["token"] == "token_id:72"


async def test_best_of_ranks_by_log_probabilities_whatever_the_server_reports(served: Served) -> None:
    await served.http.post(PATH, json={"prompt": "a", "n": 1, "best_of": 2, "max_tokens": 1})
    await served.http.post(PATH, json={"prompt": "a", "n": 1, "max_tokens": 1})
    assert [seen[1].logprobs_mode for seen in served.engine.seen] == ["raw_logprobs", None]
