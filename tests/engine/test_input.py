"""What is refused before it reaches the engine, with which words; how requests are fanned out and seeded."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.config import EngineConfig
from pagemill.engine.input import InputProcessor, PreparedRequest
from pagemill.errors import PromptTooLongError, RequestError
from pagemill.params import SamplingParams
from tests.engine.fakes import MODEL_CONFIG, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def processor(*, clamp: bool = False, max_model_len: int = 16, **fields: Any) -> InputProcessor:
    return InputProcessor(
        TOKENIZER,
        model_config=MODEL_CONFIG,
        max_model_len=max_model_len,
        config=EngineConfig(**fields),
        clamp=clamp,
    )


def prepare(prompt: Any, clamp: bool = False, **values: Any) -> PreparedRequest:
    params = SamplingParams.create(**{"max_tokens": 1, **values})
    return processor(clamp=clamp).prepare(prompt, params, "id", arrival_s=1.0)


def test_text_is_tokenised_with_the_special_tokens_and_chat_without() -> None:
    text = "hi"
    assert prepare(text, max_tokens=1).prompt_token_ids == TOKENIZER.encode(text)
    plain = processor().prepare(text, SamplingParams(max_tokens=1), "id", arrival_s=1.0, add_special_tokens=False)
    assert plain.prompt_token_ids == TOKENIZER.encode(text, add_special_tokens=False)
    assert plain.prompt == text


def test_prompt_and_output_past_the_context_are_refused_with_the_three_numbers() -> None:
    with pytest.raises(PromptTooLongError, match=r"10 tokens and max_tokens=7, together 17.* 16 tokens.* at most 6"):
        prepare([7] * 10, max_tokens=7)
    assert prepare([7] * 10, max_tokens=6).requests[0].max_tokens == 6
    assert prepare([7] * 10, clamp=True, max_tokens=7).requests[0].max_tokens == 6


@pytest.mark.parametrize("length", [16, 40])
def test_a_prompt_that_leaves_no_room_is_refused_and_never_cut(length: int) -> None:
    for clamp in (False, True):
        with pytest.raises(PromptTooLongError, match=rf"{length} tokens .* 16 tokens"):
            prepare([7] * length, clamp=clamp, max_tokens=1)


def test_a_prompt_that_fills_the_context_may_be_scored() -> None:
    assert prepare([7] * 16, max_tokens=0, prompt_logprobs=1).needs_engine
    assert not prepare([7] * 16, max_tokens=0).needs_engine


def test_max_tokens_none_is_what_the_prompt_leaves() -> None:
    prepared = prepare([7] * 10, max_tokens=None)
    assert prepared.requests[0].max_tokens == 6
    assert prepared.params.max_tokens == 6


def test_a_prompt_is_cut_only_on_request_and_at_its_start() -> None:
    assert prepare([5, 6, 7, 8], truncate_prompt_tokens=2).prompt_token_ids == [7, 8]
    assert prepare([5, 6, 7, 8], truncate_prompt_tokens=2, truncation_side="right").prompt_token_ids == [5, 6]


def test_minus_one_cuts_to_what_leaves_room_for_the_output() -> None:
    prompt = [5 + index % 200 for index in range(1000)]
    limit = prepare([5], max_tokens=None).params.max_tokens or 0
    fitted = prepare(prompt, truncate_prompt_tokens=-1, max_tokens=10)
    assert fitted.prompt_token_ids == prompt[-(limit + 1 - 10) :]
    assert fitted.params.max_tokens == 10
    assert prepare(prompt[:5], truncate_prompt_tokens=-1).prompt_token_ids == prompt[:5]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt cannot be empty"):
        prepare(prompt)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([5, 320], {}, "token id 320.* 0 to 319"),
        ([5, -1], {}, "token id -1"),
        ([5, True], {}, "True; token ids are integers"),
        ([5], {"stop_token_ids": [320]}, "stop_token_ids holds token id 320"),
        ([5], {"allowed_token_ids": [400]}, "allowed_token_ids holds token id 400"),
        ([5], {"logit_bias": {999: 1.0}}, "logit_bias holds token id 999"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(prompt: Any, params: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        prepare(prompt, **params)


def test_more_logprobs_than_the_engine_gives_are_refused() -> None:
    with pytest.raises(RequestError, match=r"logprobs=6 .* 5") as caught:
        processor(max_logprobs=5).prepare([5], SamplingParams(logprobs=6, max_tokens=1), "id", arrival_s=1.0)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_priority_that_would_change_nothing_is_refused(policy: str) -> None:
    def ask(priority: int) -> int:
        made = processor(scheduling_policy=policy)
        prepared = made.prepare("ab", SamplingParams(max_tokens=2), "r", arrival_s=0.0, priority=priority)
        return prepared.requests[0].priority

    assert ask(0) == 0
    if policy == "priority":
        assert ask(-3) == -3
    else:
        with pytest.raises(RequestError, match=r"priority=-3.*--scheduling-policy priority") as refused:
            ask(-3)
        assert refused.value.param == "priority"


def test_n_completions_share_the_prompt_and_differ_in_their_seed() -> None:
    prepared = prepare([5, 6], n=3, seed=2**64 - 1, prompt_logprobs=1)
    assert [request.seed for request in prepared.requests] == [2**64 - 1, 0, 1]
    assert len({request.request_id for request in prepared.requests}) == 3
    assert all(request.params.n == 1 for request in prepared.requests)
    assert [request.params.prompt_logprobs for request in prepared.requests] == [1, None, None]


def test_seeds_are_drawn_from_the_engines_own() -> None:
    def drawn(seed: int) -> list[int]:
        made = processor(seed=seed)
        return [made.prepare([5], SamplingParams(max_tokens=1), "id", arrival_s=1.0).requests[0].seed for _ in range(3)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 3


def test_two_requests_with_one_name_get_two_names_inside() -> None:
    assert prepare([5]).requests[0].request_id != prepare([5]).requests[0].request_id


def test_every_end_of_text_id_is_known_to_the_engine() -> None:
    assert prepare([5]).requests[0].eos_token_ids == (2,)


def test_bad_words_are_found_at_the_start_and_after_a_space() -> None:
    words = prepare([5], bad_words=["the"]).requests[0].bad_words_token_ids
    bare, spaced = (TOKENIZER.encode(text, add_special_tokens=False) for text in ("the", " the"))
    assert words == [bare, spaced]


def test_bad_words_are_tokenised_once_for_all_prompts_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = byte_level_tokenizer(), []

    def counting(texts: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
        encoded.extend(texts)
        return TOKENIZER.encode_batch(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counting)
    taker = processor()
    taker.tokenizer = tokenizer
    words = [f"word {number}" for number in range(100)]
    found = []
    for _ in range(50):
        params = SamplingParams.create(max_tokens=1, bad_words=list(words), n=2)
        prepared = taker.prepare([5, 6], params, "id", arrival_s=1.0)
        found += [request.bad_words_token_ids for request in prepared.requests]
    assert len(encoded) == 2 * len(words)
    assert found == [found[0]] * 100
    assert len(found[0]) == 2 * len(words)


def test_a_stop_string_that_is_a_special_token_is_stopped_at_by_id() -> None:
    prepared = prepare([5], stop=["<|im_end|>", "x"], stop_token_ids=[9])
    assert prepared.requests[0].params.stop_token_ids == (9, 4)
    assert prepared.stop_by_id == {4: "<|im_end|>"}
