"""LLM: prompts in every form, answers in order, errors that stay with their prompt."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill.config import EngineConfig
from pagemill.engine.offline import LLM
from pagemill.errors import ConfigError, EngineDeadError, PromptTooLongError, RequestError
from pagemill.params import FinishReason, SamplingParams, StructuredOutputsParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, tiny_model: object) -> Iterator[LLM]:
    config = EngineConfig(
        model=str(tiny_model), dtype="float32", num_threads=1, num_gpu_blocks_override=64, max_num_seqs=4
    )
    with LLM.from_config(config) as made:
        yield made


def test_prompts_come_as_text_ids_or_dicts_alone_or_in_lists(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the fox")
    forms = ["the fox", ids, {"prompt": "the fox"}, {"prompt_token_ids": ids}]
    alone = [llm.generate(form, PARAMS, use_tqdm=False) for form in forms]
    together = llm.generate(forms, PARAMS, use_tqdm=False)
    expected = together[0].outputs[0].token_ids
    assert len(expected) == 6
    assert all(output.outputs[0].token_ids == expected for output in [*together, *(each[0] for each in alone)])


def test_an_unknown_engine_option_is_named_with_the_close_ones() -> None:
    with pytest.raises(ConfigError, match=r"'max_seqs'; did you mean .*max_num_seqs") as refused:
        LLM("any", max_seqs=3)
    assert len(str(refused.value)) < 100


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"stop": "Paris"}, {"stop": ("Paris",)}),
        ({"bad_words": "Paris"}, {"bad_words": ("Paris",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
        ({"stop": None, "stop_token_ids": None, "bad_words": None, "logit_bias": None}, {}),
        ({"temperature": None, "n": None, "top_k": None, "min_tokens": None, "detokenize": None}, {}),
        ({"logit_bias": {"5": 1.0}}, {"logit_bias": {5: 1.0}}),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"structured_outputs": StructuredOutputsParams(choice=("yes", "no"))},
        ),
    ],
)
def test_a_parameter_may_be_written_as_callers_write_it(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert SamplingParams(**given) == SamplingParams(**meant)
    SamplingParams(**given).verify()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": 5}, "stop=5 must be a list of strings"),
        ({"stop": [5]}, "stop holds 5"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\] must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias='x' must be an integer"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list of integers"),
        ({"allowed_token_ids": 5}, "allowed_token_ids=5 must be a list of integers"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex=5 must be a string"),
        ({"structured_outputs": 5}, "structured_outputs=5 must be an object"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
        ({"n": 1.5}, "n=1.5 must be an integer"),
        ({"stop": "x" * 500, "truncation_side": ["y" * 500]}, r"truncation_side=\['yyy.*\.\.\. must be a string"),
    ],
)
def test_a_parameter_of_the_wrong_type_is_named(llm: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        llm.generate("a", SamplingParams(**given), use_tqdm=False)
    assert refused.value.param in given


def test_an_unknown_parameter_is_named_with_the_close_ones_only() -> None:
    with pytest.raises(RequestError, match="did you mean temperature") as refused:
        SamplingParams.create(temprature=1)
    assert len(str(refused.value)) < 100
    with pytest.raises(RequestError, match=r"'regx'; did you mean regex\?"):
        SamplingParams(structured_outputs={"regx": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [None, 5, [None], [["a"]], b"bytes"])
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt") as refused:
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert refused.value.param == "prompt"


def test_parameters_of_the_wrong_kind_and_messages_of_none_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"sampling_params is of type dict; it must be SamplingParams"):
        llm.generate("a", {"max_tokens": 2}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"sampling_params is of type str"):
        llm.generate(["a"], ["b"], use_tqdm=False)  # type: ignore[list-item]
    for messages in (None, "Hi", 5):
        with pytest.raises(RequestError, match="it must be a list of messages"):
            llm.chat(messages, PARAMS, use_tqdm=False)  # type: ignore[arg-type]


def test_a_lone_stop_string_ends_the_output_where_it_stands_whole(llm: LLM) -> None:
    free = llm.generate("the fox", PARAMS, use_tqdm=False)[0].outputs[0].text
    stop = free[2:5]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
    assert llm.generate("the fox", params, use_tqdm=False)[0].outputs[0].text == free[: free.index(stop)]


def test_results_are_in_the_prompts_order_whatever_finishes_first(llm: LLM) -> None:
    prompts = [[5 + index, 6, 7] for index in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + (7 * index) % 12, ignore_eos=True) for index in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]


def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"prompt 1: .* 500 tokens"):
        llm.generate([[5], [5] * 500], PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate([[5], [6]], [PARAMS], use_tqdm=False)
    assert llm.generate([5], PARAMS, use_tqdm=False)[0].finished


def test_an_output_that_would_pass_the_context_ends_with_length(llm: LLM) -> None:
    (output,) = llm.generate([5] * 120, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_chat_renders_the_models_own_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, PARAMS, use_tqdm=False)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids[0] == llm.tokenizer.token_to_id("<|im_start|>")
    both = llm.chat([messages, messages], PARAMS, use_tqdm=False)
    assert [each.outputs[0].text for each in both] == [one.outputs[0].text] * 2


def test_a_seeded_request_is_the_same_alone_and_among_others(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=123, max_tokens=8, ignore_eos=True)
    (alone,) = llm.generate("the fox", params, use_tqdm=False)
    among = llm.generate(["a dog", "the fox", "in a while"], params, use_tqdm=False)
    assert among[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_stream_yields_tokens_as_they_come_and_frees_its_blocks_when_closed(llm: LLM) -> None:
    stream = llm.stream("the fox", SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(next(stream).outputs[0].token_ids) == 1
    stream.close()
    assert llm.call("stats").kv_usage == 0
    assert llm.call("check_invariants") is None


def test_every_output_token_has_its_time(llm: LLM) -> None:
    times = llm.token_times("the fox", PARAMS)
    assert len(times) == 6
    assert times == sorted(times)


def test_a_stream_of_any_length_is_worked_through_with_its_errors(llm: LLM) -> None:
    items = [(index, [5, 6 + index] if index != 7 else [5] * 500, PARAMS) for index in range(20)]
    results = dict(llm.complete(iter(items), ahead=2))
    assert sorted(results) == list(range(20))
    assert [key for key, result in results.items() if isinstance(result, PromptTooLongError)] == [7]


def test_an_interrupt_leaves_the_engine_usable(llm: LLM) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    stream = llm.stream("the fox", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    step = llm._client.core.executor.sample

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        llm._client.core.executor.sample = step  # type: ignore[method-assign]
        return step(*args)  # type: ignore[arg-type]

    llm._client.core.executor.sample = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert llm.call("check_invariants") is None
    assert llm.generate("the fox", PARAMS, use_tqdm=False)[0].finished


def test_the_progress_bar_counts_requests_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5], [6]], PARAMS, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown


def test_totals_say_what_a_run_did(llm: LLM) -> None:
    before = llm.stats()
    llm.generate([[5, 6, 7], [6, 7, 8]], PARAMS, use_tqdm=False)
    after = llm.stats()
    assert after.num_generated_tokens - before.num_generated_tokens == 12
    assert after.num_prompt_tokens - before.num_prompt_tokens == 6
    assert after.filled_slot_steps <= after.allocated_slot_steps


def test_an_engine_that_failed_says_so_and_takes_no_more(tiny_config: EngineConfig) -> None:
    with LLM.from_config(tiny_config) as broken:

        def fails(*args: object) -> object:
            raise ZeroDivisionError("in the middle of a step")

        broken._client.core.executor.sample = fails  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            broken.generate("the fox", PARAMS, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: in the middle"):
            broken.generate("the fox", PARAMS, use_tqdm=False)


def test_a_model_that_makes_vectors_neither_generates_nor_chats(tiny_config: EngineConfig) -> None:
    with LLM.from_config(dataclasses.replace(tiny_config, runner="pooling")) as llm:
        with pytest.raises(RequestError, match="makes vectors and no text"):
            llm.generate("hi", use_tqdm=False)
        with pytest.raises(RequestError, match="makes vectors and no text"):
            llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
