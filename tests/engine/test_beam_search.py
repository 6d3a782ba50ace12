"""Beam search finds what transformers' finds, and stays within its rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagemill.engine.beam_search import BeamSearch, step_params
from pagemill.engine.detokenizer import Vocabulary
from pagemill.engine.offline import LLM
from pagemill.errors import EngineError, RequestError
from pagemill.params import BeamSearchParams, CompletionOutput, FinishReason, Logprob, RequestOutput, SamplingParams
from tests.server.fake_engine import ByteTokenizer

PROMPTS = [[5, 6, 7, 8], [40, 41, 42] * 7, [9]]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float32", num_threads=1, num_gpu_blocks_override=64, max_num_seqs=8) as made:
        yield made


@pytest.mark.parametrize(("width", "length_penalty"), [(3, 1.0), (4, 0.0), (4, -1.5), (5, 2.0)])
def test_beams_and_their_scores_are_those_of_transformers(
    llm: LLM, tiny_model: Path, width: int, length_penalty: float
) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    # Every third token ends the text, so that beams of many lengths compete.
    ending = list(range(0, llm.model_config.vocab_size, 3))[: 20 - width]
    params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=length_penalty)
    llm._input.eos_token_ids = tuple(ending)
    found = llm.beam_search(PROMPTS, params)
    lengths = set()
    for prompt, output in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                generation_config=transformers.GenerationConfig(
                    num_beams=width,
                    num_return_sequences=width,
                    do_sample=False,
                    max_new_tokens=9,
                    early_stopping="never",
                    length_penalty=length_penalty,
                    eos_token_id=ending,
                    pad_token_id=ending[0],
                    output_scores=True,
                    return_dict_in_generate=True,
                ),
            )
        for index, completion in enumerate(output.outputs):
            produced = completion.token_ids
            lengths.add(len(produced))
            wanted = expected.sequences[index, len(prompt) : len(prompt) + len(produced)].tolist()
            assert produced == wanted, (index, output)
            assert completion.cumulative_logprob is not None
            score = completion.cumulative_logprob / len(produced) ** length_penalty
            assert score == pytest.approx(float(expected.sequences_scores[index]), abs=1e-4)
            assert completion.finish_reason is (FinishReason.STOP if produced[-1] in ending else FinishReason.LENGTH)
    assert len(lengths) > 1 or length_penalty > 1


def candidates(*values: tuple[int, float]) -> RequestOutput:
    listed = {token: Logprob(value, rank, chr(token)) for rank, (token, value) in enumerate(values, 1)}
    completion = CompletionOutput(index=0, text="", token_ids=[values[0][0]], logprobs=[listed])
    return RequestOutput(request_id="x", prompt=None, prompt_token_ids=[1], outputs=[completion], num_cached_tokens=3)


A, B, END = 65, 66, 257


def test_the_best_sum_wins_although_its_first_token_was_second() -> None:
    search = BeamSearch([1], BeamSearchParams(beam_width=2, max_tokens=2, logprobs=1), 100, [END])
    assert search.prompts() == [[1]]
    search.advance([candidates((A, -0.5), (B, -0.9), (END, -5.0))])
    assert search.prompts() == [[1, A], [1, B]]
    search.advance([candidates((A, -2.0), (B, -2.1), (END, -9.0)), candidates((A, -0.1), (B, -3.0), (END, -9.0))])
    assert search.prompts() == []
    output = search.output("id", "p", Vocabulary(ByteTokenizer()))
    assert [completion.text for completion in output.outputs] == ["BA", "AA"]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-1.0)
    assert (output.num_cached_tokens, output.finished) == (3, True)
    assert output.outputs[0].logprobs is not None
    assert [list(each) for each in output.outputs[0].logprobs] == [[B, A], [A]]


def test_an_end_counts_only_among_the_best_and_stops_the_search_when_nothing_can_pass_it() -> None:
    search = BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=50), 100, [END])
    search.advance([candidates((A, -0.5), (END, -0.6))])
    assert search.prompts() == [[1, A]]
    search.advance([candidates((END, -0.1), (A, -40.0))])
    assert search.prompts() == []
    (only,) = search.output("id", None, Vocabulary(ByteTokenizer())).outputs
    assert (only.text, only.token_ids, only.finish_reason) == ("A", [A, END], FinishReason.STOP)


def test_no_room_is_an_empty_answer_and_a_failed_step_is_an_error() -> None:
    search = BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=0), 100, [])
    assert search.prompts() == []
    assert search.output("id", None, Vocabulary(ByteTokenizer())).outputs[0].text == ""
    search = BeamSearch([1], BeamSearchParams(beam_width=1, max_tokens=None), 2, [])
    broken = candidates((A, -1.0))
    broken.outputs[0].finish_reason = FinishReason.ERROR
    with pytest.raises(EngineError):
        search.advance([broken])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 20}, "it can be 18"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 2, "max_tokens": -1}, "max_tokens"),
        ({"beam_width": 2, "logprobs": 21}, "logprobs"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_the_limit(values: dict[str, float], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        step_params(BeamSearchParams(**values), [1, 2])  # type: ignore[arg-type]
    assert step_params(BeamSearchParams(beam_width=20, ignore_eos=True), [1, 2]).logprobs == 20


def test_a_beam_of_one_is_the_greedy_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    greedy = llm.generate(PROMPTS, params, use_tqdm=False)
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=12, length_penalty=0.0))
    for one, other in itertools.zip_longest(greedy, found):
        assert (one.outputs[0].token_ids, one.outputs[0].text) == (other.outputs[0].token_ids, other.outputs[0].text)
