"""What a caller sees: deltas that add up, stop reasons, logprobs, several completions, errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagemill.engine.output as output_module
from pagemill.errors import NonFiniteLogitsError, RequestError
from pagemill.params import FinishReason, RequestOutput
from tests.engine.fakes import byte_level_tokenizer, scripted
from tests.engine.harness import Engine

TOKENIZER = byte_level_tokenizer()
PROMPT = [5, 6, 4]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def saying(text: str | list[int], **options: object) -> Engine:
    """An engine whose model says this text, then end-of-text."""
    return Engine(scripted(ids(text) if isinstance(text, str) else text), **options)


def joined(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(each.text for output in outputs for each in output.outputs if each.index == index)


def test_deltas_add_up_to_the_whole_and_end_once() -> None:
    text = "the fox 😀 jumps"
    engine = saying(text)
    deltas = engine.stream(engine.ask(PROMPT, max_tokens=50))
    assert joined(deltas) == text
    assert [token for output in deltas for token in output.outputs[0].token_ids] == [*ids(text), 2]
    assert [output.outputs[0].finish_reason for output in deltas if output.outputs[0].finished] == [FinishReason.STOP]
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    cumulative = engine.stream(engine.ask(PROMPT, "cumulative", max_tokens=50))
    assert [output.outputs[0].text for output in cumulative][-1] == text
    assert all(text.startswith(output.outputs[0].text) for output in cumulative)
    final = engine.stream(engine.ask(PROMPT, "final", max_tokens=50))
    assert len(final) == 1
    assert final[0].outputs[0].text == text
    assert final[0].outputs[0].token_ids == [*ids(text), 2]
    assert final[0].outputs[0].stop_reason is None


words = st.sampled_from(["the", "fox", " ", "a", "b", "é", "😀", "<|im_end|>", "\n", "ab", "ba"])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_streamed_merged_and_final_answers_are_equal_for_any_parameters(data: st.DataObject) -> None:
    script = data.draw(
        st.lists(st.one_of(st.integers(3, 319), words.map(lambda word: ids(word)[0])), min_size=1, max_size=25)
    )
    params = {
        "max_tokens": data.draw(st.integers(1, 30)),
        "stop": data.draw(st.lists(st.lists(words, min_size=1, max_size=3).map("".join), max_size=3)),
        "stop_token_ids": data.draw(st.lists(st.integers(3, 319), max_size=2)),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "ignore_eos": data.draw(st.booleans()),
        "logprobs": data.draw(st.sampled_from([None, 0, 2])),
    }
    params["min_tokens"] = data.draw(st.integers(0, params["max_tokens"]))
    engine = saying(script)
    streamed = engine.stream(engine.ask(PROMPT, **params))
    (final,) = engine.stream(engine.ask(PROMPT, "final", **params))
    *_, cumulative = engine.stream(engine.ask(PROMPT, "cumulative", **params))
    merged = engine.ask(PROMPT, **params)
    engine.finish()
    late = merged.take()
    assert late is not None
    whole, last = final.outputs[0], streamed[-1].outputs[0]
    assert joined(streamed) == whole.text == cumulative.outputs[0].text == late.outputs[0].text
    assert [token for output in streamed for token in output.outputs[0].token_ids] == whole.token_ids
    assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    if params["logprobs"] is not None:
        pieces = [each for output in streamed for each in output.outputs[0].logprobs or []]
        assert pieces == whole.logprobs
        assert len(pieces) == len(whole.token_ids)
    if not params["stop"] and whole.finish_reason is FinishReason.LENGTH:
        skip = params["skip_special_tokens"]
        assert whole.text == TOKENIZER.decode(whole.token_ids, skip_special_tokens=skip)


def test_a_slow_reader_gets_everything_merged() -> None:
    engine = saying("the quick brown fox")
    state = engine.ask(PROMPT, max_tokens=50)
    engine.finish()
    output = state.take()
    assert output is not None
    assert output.finished
    assert output.outputs[0].text == "the quick brown fox"
    assert state.take() is None


@pytest.mark.parametrize("kind", ["delta", "final"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_ends_the_request(kind: str, include: bool) -> None:
    engine = saying("think\nObservation: never shown")
    state = engine.ask(PROMPT, kind, max_tokens=50, stop="\nObservation", include_stop_str_in_output=include)
    outputs = engine.stream(state)
    assert joined(outputs) == ("think\nObservation" if include else "think")
    assert outputs[-1].outputs[0].finish_reason is FinishReason.STOP
    assert outputs[-1].outputs[0].stop_reason == "\nObservation"
    engine.finish()
    assert engine.core.scheduler.stats().num_used_blocks == 0


def test_held_back_text_is_shown_when_the_request_ends_without_the_stop_string() -> None:
    engine = saying("think\nObs")
    outputs = engine.stream(engine.ask(PROMPT, max_tokens=50, stop="\nObservation"))
    assert joined(outputs) == "think\nObs"
    assert outputs[-1].outputs[0].stop_reason is None


def test_no_stop_string_counts_before_min_tokens() -> None:
    engine = saying("xxxxxx")
    assert joined(engine.stream(engine.ask(PROMPT, max_tokens=50, stop="x", min_tokens=3))) == "xxx"


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi<|im_end|>")])
def test_only_the_stop_token_itself_is_taken_out(include: bool, text: str) -> None:
    engine = saying([3, *ids("hi"), 4, *ids("no")])
    state = engine.ask(PROMPT, "final", max_tokens=50, stop_token_ids=[4], include_stop_str_in_output=include)
    (output,) = engine.stream(state)
    assert output.outputs[0].text == text
    assert output.outputs[0].stop_reason == 4
    assert output.outputs[0].token_ids[-1] == 4


@pytest.mark.parametrize("kind", ["delta", "final"])
def test_a_stop_string_that_is_a_special_token_stops_by_id(kind: str) -> None:
    engine = saying([*ids("hi"), 4, *ids("no")])
    outputs = engine.stream(engine.ask(PROMPT, kind, max_tokens=50, stop="<|im_end|>"))
    assert joined(outputs) == "hi"
    assert outputs[-1].outputs[0].stop_reason == "<|im_end|>"


def test_the_end_of_text_token_is_not_text_even_where_special_tokens_are_shown() -> None:
    engine = saying([3, *ids("hi")])
    outputs = engine.stream(engine.ask(PROMPT, max_tokens=50, skip_special_tokens=False))
    assert joined(outputs) == "<|im_start|>hi"


def test_logprobs_name_each_token_by_its_own_text() -> None:
    text = "\n1. the 😀"
    engine = saying(text)
    (output,) = engine.stream(engine.ask(PROMPT, "final", max_tokens=len(ids(text)), logprobs=2))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen = [next(iter(entry.items())) for entry in completion.logprobs]
    assert [token for token, _ in chosen] == completion.token_ids
    assert "".join(logprob.decoded_token or "" for _, logprob in chosen) == text
    assert completion.cumulative_logprob == pytest.approx(-0.25 * len(chosen))
    assert [len(entry) for entry in completion.logprobs] == [2] * len(chosen)


def test_prompt_logprobs_cover_the_prompt_whatever_its_chunks() -> None:
    prompt = [1, *ids("\n7 foxes and 😀")]
    for chunk in (64, 3):
        engine = Engine(max_num_batched_tokens=chunk)
        (output,) = engine.stream(engine.ask(prompt, "final", prompt_logprobs=0, max_tokens=0))
        found = output.prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert [next(iter(entry)) for entry in found[1:] if entry is not None] == prompt[1:]
        texts = [next(iter(entry.values())).decoded_token for entry in found[1:] if entry is not None]
        assert "".join(text or "" for text in texts) == "\n7 foxes and 😀"
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chunk", [64, 5, 3])
def test_every_output_of_a_stream_has_all_prompt_logprobs_whatever_the_chunks(kind: str, n: int, chunk: int) -> None:
    prompt = [1, *ids("\n7 foxes and 😀")]
    engine = Engine()
    (whole,) = engine.stream(engine.ask(prompt, "final", prompt_logprobs=1, max_tokens=4))
    assert whole.prompt_logprobs is not None
    engine = Engine(max_num_batched_tokens=chunk)
    engine.stream(engine.ask(prompt, max_tokens=4))  # the second completion finds the prompt in the cache
    outputs = engine.stream(engine.ask(prompt, kind, prompt_logprobs=1, max_tokens=4, n=n))
    assert [output.prompt_logprobs for output in outputs] == [whole.prompt_logprobs] * len(outputs)
    assert sum(len(each.token_ids) for output in outputs for each in output.outputs) >= 4 * n


def test_prompt_logprobs_are_made_once_however_long_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = output_module._candidates

    def counting(*args: Any) -> Any:
        made.append(args)
        return original(*args)

    monkeypatch.setattr(output_module, "_candidates", counting)
    prompt = [1, *ids("foxes")]
    engine = Engine()
    outputs = engine.stream(engine.ask(prompt, prompt_logprobs=1, max_tokens=20))
    assert len(outputs) == 20
    assert len(made) == len(prompt) - 1


def test_a_request_that_ends_before_its_prompt_logprobs_are_there_says_so() -> None:
    engine = Engine(max_num_batched_tokens=3)
    state = engine.ask([1, *ids("many foxes")], prompt_logprobs=1, max_tokens=4)
    engine.step()
    assert state.take() is None
    engine.abort(state)
    output = state.take()
    assert output is not None
    assert output.finished
    assert output.prompt_logprobs is None


def test_n_completions_are_told_apart_and_keep_their_order() -> None:
    engine = Engine()
    state = engine.ask(PROMPT, n=3, max_tokens=4, seed=7)
    outputs = engine.stream(state)
    texts = [joined(outputs, index) for index in range(3)]
    assert len(set(texts)) == 3
    (final,) = engine.stream(engine.ask(PROMPT, "final", n=3, max_tokens=4, seed=7))
    assert [each.index for each in final.outputs] == [0, 1, 2]
    assert [each.text for each in final.outputs] == texts
    assert sum(output.finished for output in outputs) == 1


def test_without_detokenize_only_ids_come() -> None:
    engine = saying("hello")
    (output,) = engine.stream(engine.ask(PROMPT, "final", max_tokens=50, detokenize=False))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids == [*ids("hello"), 2]


def test_an_abort_keeps_what_was_there_and_frees_the_blocks() -> None:
    engine = saying("the quick brown fox jumps")
    state = engine.ask(PROMPT, max_tokens=50)
    engine.step()
    engine.abort(state)
    output = state.take()
    assert output is not None
    assert output.finished
    assert output.outputs[0].finish_reason is FinishReason.ABORT
    assert output.outputs[0].text
    engine.step()
    assert engine.metrics.last.num_running == 0
    assert engine.metrics.last.kv_usage == 0
    assert engine.metrics.finished(FinishReason.ABORT) == 1


def test_a_request_that_is_aborted_while_it_queues_leaves_nothing() -> None:
    engine = Engine(max_num_seqs=1)
    first, second = engine.ask(PROMPT, max_tokens=4), engine.ask(PROMPT, max_tokens=4)
    engine.step()
    assert engine.metrics.num_waiting == 1
    engine.abort(second)
    assert engine.metrics.num_waiting == 0
    engine.finish()
    assert first.finished
    assert engine.core.scheduler.stats().num_waiting == 0


def test_a_request_that_never_fits_the_kv_cache_fails_alone() -> None:
    engine = Engine(num_blocks=4)
    big, small = engine.ask([7] * 40, max_tokens=4), engine.ask(PROMPT, "final", max_tokens=4)
    engine.finish()
    assert isinstance(big.error, RequestError)
    assert "40" in str(big.error)
    output = small.take()
    assert output is not None
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_logits_that_are_no_numbers_end_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    bad, good = engine.ask([9, 9, 4], max_tokens=4), engine.ask(PROMPT, max_tokens=4)
    sample = engine.executor.sample

    def poisoned(plan, mask, handle):  # type: ignore[no-untyped-def]
        result = sample(plan, mask, handle)
        for row, request_id in enumerate(plan.request_ids):
            if request_id == bad.children[0].request_id:
                result.token_ids[row] = []
                result.non_finite.append(request_id)
        return result

    monkeypatch.setattr(engine.executor, "sample", poisoned)
    engine.finish()
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert engine.metrics.finished(FinishReason.ERROR) == 1
    assert good.error is None
    assert good.finished


def test_two_requests_with_one_name_are_two_requests() -> None:
    engine = Engine()
    states = [engine.ask([token, 4], request_id="same", max_tokens=3) for token in (7, 8)]
    engine.finish()
    outputs = [state.take() for state in states]
    assert [output.request_id for output in outputs if output] == ["same", "same"]
    assert outputs[0] is not None
    assert outputs[1] is not None
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids
