"""Constrained outputs are what was asked for, alone and batched, whatever else a request wants."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from numpy.typing import NDArray

from pagemill import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from pagemill.config import EngineConfig
from pagemill.core.messages import EngineOutput, EngineRequest, NewRow, SchedulerOutput
from pagemill.engine import grammars
from pagemill.engine.grammar_compiler import compile_grammar
from pagemill.errors import RequestError
from pagemill.params import FinishReason
from pagemill.platform import CpuPlatform
from pagemill.worker.executor import InprocExecutor
from tests.engine.fakes import MODEL_CONFIG
from tests.models.tiny import VOCAB_SIZE, tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": r"[ab]{3}-\d{2}"},
    {"choice": ["yes", "no (not today)", "a.b|c"]},
    {"grammar": 'root ::= "x" ("+" "x"){1,3}'},
]


OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=[1, 3], ids=["no CPU free", "two CPUs free"])
def llm(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "num_cpus", lambda _: request.param)
        running = LLM(tiny_model, **OPTIONS)
    with running:
        yield running


def params(structured: dict[str, Any], **values: Any) -> SamplingParams:
    return SamplingParams.create(structured_outputs=structured, **{"max_tokens": 100, "seed": 3, **values})


def run(llm: LLM, asked: list[SamplingParams]) -> list[RequestOutput]:
    prompts = [f"the quick brown fox {index}" for index in range(len(asked))]
    return llm.generate(prompts, asked, use_tqdm=False)


def check(form: dict[str, Any], text: str) -> None:
    if "json" in form:
        found = json.loads(text)
        assert set(found) == {"name", "tags", "age"}
        assert len(found["name"]) <= 6
        assert 0 <= found["age"] <= 99
    elif "regex" in form:
        assert re.fullmatch("[ab]{3}-[0-9]{2}", text)
    elif "choice" in form:
        assert text in form["choice"]
    else:
        assert text in ("x+x", "x+x+x", "x+x+x+x")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.9])
def test_the_output_is_of_the_form_and_stops_by_itself(llm: LLM, form: dict[str, Any], temperature: float) -> None:
    (output,) = run(llm, [params(form, temperature=temperature)])
    check(form, output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"


def test_alone_and_batched_give_the_same_bits(llm: LLM) -> None:
    pytest.importorskip("pagemill._native", reason="products of the reference ops depend on the number of rows")
    asked = [params(form, logprobs=2, seed=seed) for seed in range(3) for form in FORMS]
    asked.insert(5, SamplingParams.create(seed=9, max_tokens=20, logprobs=2))
    prompts = [f"the quick brown fox {index}" for index in range(len(asked))]
    batched = llm.generate(prompts, asked, use_tqdm=False)
    alone = [llm.generate([p], each, use_tqdm=False)[0] for p, each in zip(prompts, asked, strict=True)]
    for one, other in zip(batched, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_the_matcher_is_rebuilt_after_a_preemption(tiny_model: Path) -> None:
    asked = [params({"regex": "(ab|c|d){55}"}, seed=seed, max_tokens=90) for seed in range(6)]
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 6, "block_size": 16}
    with LLM(tiny_model, num_gpu_blocks_override=64, **options) as wide:
        expected = [output.outputs[0].text for output in run(wide, asked)]
    with LLM(tiny_model, num_gpu_blocks_override=16, **options) as tight:
        found = [output.outputs[0].text for output in run(tight, asked)]
        assert tight.call("stats").num_preemptions > 0
        tight.call("check_invariants")
    assert found == expected
    assert all(re.fullmatch("(ab|c|d){55}", text) for text in found)


def test_it_goes_with_n_logprobs_stop_and_max_tokens(llm: LLM) -> None:
    choices = {"choice": ["positive", "negative"]}
    (several,) = run(llm, [params(choices, n=3, logprobs=2)])
    for completion in several.outputs:
        assert completion.text in choices["choice"]
        assert completion.logprobs is not None
        assert all(entry.logprob >= -9999.0 for position in completion.logprobs for entry in position.values())
    (stopped,) = run(llm, [params({"regex": "abc{30}"}, stop="bc")])
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("a", "bc")
    (cut,) = run(llm, [params({"regex": "a{50}"}, max_tokens=3)])
    assert (len(cut.outputs[0].token_ids), cut.outputs[0].finish_reason) == (3, "length")


def test_the_end_is_allowed_only_where_the_grammar_accepts(llm: LLM) -> None:
    (output,) = run(llm, [params({"regex": "a{40}"}, logit_bias={llm.tokenizer.eos_ids[0]: 100.0})])
    assert output.outputs[0].text == "a" * 40


def test_min_tokens_holds_until_the_grammar_ends(llm: LLM) -> None:
    eager = {llm.tokenizer.eos_ids[0]: 100.0}
    (longer,) = run(llm, [params({"regex": "a{1,40}"}, min_tokens=8, logit_bias=eager)])
    assert len(longer.outputs[0].token_ids) == 9
    (ended,) = run(llm, [params({"regex": "ab"}, min_tokens=50, ignore_eos=True)])
    assert (ended.outputs[0].text, ended.outputs[0].finish_reason) == ("ab", "stop")


def test_whitespace_between_tokens_of_json_is_bounded(llm: LLM) -> None:
    blank = llm.tokenizer.encode(" ", add_special_tokens=False)[0]
    (output,) = run(llm, [params({"json": SCHEMA}, logit_bias={blank: 100.0}, temperature=0, max_tokens=110)])
    assert " " * 9 not in output.outputs[0].text


def test_a_form_that_cannot_be_enforced_names_the_keyword_and_others_go_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="uniqueItems"):
        run(llm, [params({"json": {"type": "array", "uniqueItems": True}})])
    (output,) = run(llm, [params(FORMS[2])])
    check(FORMS[2], output.outputs[0].text)


def test_a_grammar_that_leads_nowhere_says_so_shortly_and_names_its_field(llm: LLM) -> None:
    (output,) = run(llm, [params({"grammar": 'start: "a" rest\nrest: rest'})])
    error = output.outputs[0].error
    assert output.outputs[0].finish_reason is FinishReason.ERROR
    assert error is not None
    assert error.startswith("structured_outputs: ")
    assert "nothing can follow" in error
    assert "compute_time" not in error
    assert len(error) < 200


@pytest.mark.parametrize("num_free", [0, 2])
def test_masks_are_there_when_the_forward_pass_ends_where_a_cpu_was_free(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, num_free: int
) -> None:
    monkeypatch.setattr(CpuPlatform, "num_cpus", lambda _: 1 + num_free)
    with LLM(tiny_model, **OPTIONS) as running:
        core = running._client.core
        before, execute = [], core.executor.execute

        def slow(plan: SchedulerOutput) -> Any:
            forward = execute(plan)
            step = core._grammars._step
            filling = None if step is None else step.begun
            before.append(0 if filling is None else len(filling._helping))
            if filling is not None:
                for helper in filling._helping:
                    helper.result(60)
                assert next(filling._left, None) is None
            return forward

        run(running, [params(form) for form in FORMS])  # their grammars are built: all begin in one step below
        monkeypatch.setattr(core.executor, "execute", slow)
        outputs = run(running, [params(form) for form in FORMS * 2])
    for form, output in zip(FORMS * 2, outputs, strict=True):
        check(form, output.outputs[0].text)
    assert max(before) == num_free


GRAMMARS: list[dict[str, Any]] = [
    *FORMS,
    {"json_object": True},
    {"json": {"type": "object", "properties": {"city": {"type": "string"}, "count": {"type": "integer"}}}},
    {"json": {"enum": ["north", "northwest", 1, None]}},
    {"regex": "(the quick|the fox|[a-z]{1,9} )*"},
    {"grammar": 'root ::= "a" root "b" | "fox"'},
]


class Engine:
    """The grammars of an engine without its model: whoever asks chooses the tokens."""

    def __init__(self, model: Path, *, begun: bool = False) -> None:
        config = EngineConfig(model=str(model), **OPTIONS)
        self.model_config = InprocExecutor.create(config).model_config
        self.grammars = grammars.TokenGrammars(config, self.model_config, num_cpus=1, num_free_cpus=int(begun))

    def row(self, form: dict[str, Any], produced: Sequence[int] = (), *, min_tokens: int = 0) -> NewRow:
        structured = StructuredOutputsParams(
            llguidance=compile_grammar(StructuredOutputsParams(**form)), min_tokens=min_tokens
        )
        asked = SamplingParams.create(structured_outputs=structured)
        request = EngineRequest(request_id="r", prompt_token_ids=[5], params=asked, max_tokens=99, arrival_time_s=0.0)
        while not self.grammars.ready(request):
            self.grammars.wait()
        return NewRow(
            request_id="r",
            token_ids=[5, *produced],
            num_prompt_tokens=1,
            params=asked,
            seed=0,
            block_ids=[[0]],
            num_computed_tokens=len(produced),
            eos_token_ids=tuple(self.model_config.eos_token_ids),
        )

    def step(self, new_rows: Sequence[NewRow] = ()) -> Any:
        """The constraints of a step with one token."""
        self.grammars.begin(
            SchedulerOutput(
                step=0, request_ids=["r"], num_new_tokens=[1], new_block_ids=[None], new_rows=list(new_rows)
            )
        )
        step = self.grammars.constraints()
        assert step is not None
        assert step.rows().tolist() == [0]
        return step

    def accept(self, token: int) -> None:
        self.grammars.accept([EngineOutput(request_id="r", new_token_ids=[token])])

    def bits(self, step: Any) -> NDArray[np.bool_]:
        """[V] which tokens the mask allows."""
        return self._unpacked(step.bitmask(np.array([0])).view(np.uint8))

    def own_bits(self, matcher: Any) -> NDArray[np.bool_]:
        """[V] which tokens llguidance's own mask allows."""
        return self._unpacked(np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint8))

    def _unpacked(self, mask: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return np.unpackbits(mask, bitorder="little")[: self.model_config.vocab_size].astype(bool)


def allows(step: Any, token: int) -> bool:
    return bool(step.allow(np.array([0]), np.array([token]))[0])


@pytest.mark.parametrize("begun", [False, True], ids=["tried", "masks begun"])
def test_a_token_that_is_tried_is_allowed_where_its_bit_in_the_mask_is_1(
    tiny_model: Path, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a greedy row's token would depend on whether its mask was computed."""
    monkeypatch.setattr(grammars, "MASK_EVERY", 1000)
    running = Engine(tiny_model, begun=begun)
    ending, random = set(running.model_config.eos_token_ids), np.random.default_rng(5)
    num_forced = 0
    for form in GRAMMARS:
        step = running.step([running.row(form, min_tokens=3)])
        for _ in range(25):
            allowed = np.array([allows(step, token) for token in range(running.model_config.vocab_size)])
            bits = running.bits(step)
            matcher = step.due[0].matcher
            assert set(np.flatnonzero(bits != running.own_bits(matcher))) <= ending
            assert not (allowed & ~bits).any(), "what is not allowed was let through"
            assert set(np.flatnonzero(bits & ~allowed)) <= ending or matcher.is_stopped()
            num_forced += bool(matcher.compute_ff_tokens())
            running.accept(int(random.choice(np.flatnonzero(bits))))
            if matcher.is_stopped():
                break
            step = running.step()
    assert num_forced > 10


class Counting:
    """A matcher, and how often each of its methods was called."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.matcher, name)


@pytest.mark.parametrize("begun", [False, True], ids=["tried", "masks begun"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_text_that_must_follow_is_looked_for_once(tiny_model: Path, greedy: bool, begun: bool) -> None:
    """It took 140 ms for a constant of 100,000 characters, in each of its steps."""
    running = Engine(tiny_model, begun=begun)
    step = running.step([running.row({"json": {"const": "the quick brown fox " * 10}})])
    row = step.due[0]
    row.matcher = counting = Counting(row.matcher)
    num_tokens = 0
    while True:
        assert not (greedy and allows(step, 5))
        bits = running.bits(step)
        assert bits.sum() == 1
        assert running.own_bits(counting.matcher).tolist() == bits.tolist()
        running.accept(int(bits.argmax()))
        num_tokens += 1
        if counting.is_stopped():
            break
        step = running.step()
    assert num_tokens > 20
    assert counting.calls["compute_ff_tokens"] <= 3
    assert counting.calls["unsafe_compute_mask_ptr"] <= 2


def test_a_long_text_does_not_use_up_what_a_lexer_may_build(tiny_model: Path) -> None:
    """Only a mask gives it that anew: where tokens were only tried, this failed after some hundred of them."""
    running = Engine(tiny_model)
    form = {"regex": "[ab]*a[ab]{800}"}
    step = running.step([running.row(form)])
    opened = running.grammars._opened
    assert opened is not None
    token_of = {word: index for index in range(5, VOCAB_SIZE) if (word := opened.decode_str([index])) in ("a", "b")}
    random = np.random.default_rng(1)
    text = [token_of["ab"[which]] for which in random.integers(0, 2, 3000)]
    num_masks = 0
    for token in text:
        if not allows(step, token):
            num_masks += 1
            assert running.bits(step)[token], step.due[0].error
        running.accept(token)
        step = running.step()
    assert num_masks == math.ceil(len(text) / grammars.MASK_EVERY)
    resumed = Engine(tiny_model)  # after a preemption a new matcher follows the same text
    assert resumed.bits(resumed.step([resumed.row(form, text)])).tolist() == running.bits(step).tolist()


def test_a_grammar_that_came_to_its_limit_is_built_anew_for_the_next_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a matcher share a lexer and what it may build: used up by some, it failed for all who came later."""
    narrow = LLParserLimits(step_max_items=10_000, max_lexer_states=2000)
    monkeypatch.setattr(grammars, "limits", lambda: narrow)
    form = {"regex": "(.*a.{40})+z"}

    def write(running: Engine, seed: int) -> str | None:
        """Go on with "a" and "b" for a while; why it ended early."""
        step = running.step([running.row(form)])
        opened = running.grammars._opened
        assert opened is not None
        letters = [index for index in range(5, VOCAB_SIZE) if opened.decode_str([index]) in ("a", "b")]
        for token in np.random.default_rng(seed).choice(letters, 60).tolist():
            if not running.bits(step).any():
                break
            running.accept(token)
            step = running.step()
        output = EngineOutput(request_id="r", new_token_ids=[], finish_reason=FinishReason.ERROR, error="no token")
        running.grammars.accept([output])
        return None if output.error == "no token" else output.error

    running = Engine(tiny_model)
    errors = [write(running, 0)]
    while errors[-1] is None and len(errors) < 20:
        errors.append(write(running, len(errors)))
    assert len(errors) > 1, "alone it comes to no limit"
    assert "too many states" in (errors[-1] or "")
    assert write(running, len(errors) - 1) is None


def test_a_model_may_have_more_ids_than_its_tokenizer(tmp_path: Path) -> None:
    """As Qwen's do. No grammar allows one of them."""
    running = Engine(tiny_llama(tmp_path / "padded", vocab_size=VOCAB_SIZE + 80))
    step = running.step([running.row({"regex": r"(.|\n)*"})])
    tried = [allows(step, token) for token in range(VOCAB_SIZE, VOCAB_SIZE + 80)]
    bits = running.bits(step)
    assert bits[:VOCAB_SIZE].sum() > 200
    assert not bits[VOCAB_SIZE:].any()
    assert not any(tried)


def test_a_builder_has_a_limit_of_processor_time_and_none_of_patience(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is stopped for an hour refuses nothing; a builder that computes too long is given up."""
    now_s = 0.0
    monkeypatch.setattr(grammars.time, "monotonic", lambda: now_s)
    go_on = threading.Event()

    class Waiting(grammars.TokenGrammars):
        def _matcher(self, grammar: str) -> Any:
            while not go_on.is_set() and grammar == "busy":
                pass
            go_on.wait(60)
            return super()._matcher(grammar)

    config = EngineConfig(model=str(tiny_model))
    waiting = Waiting(config, MODEL_CONFIG, num_cpus=1, num_free_cpus=0)

    def request(grammar: str) -> EngineRequest:
        structured = StructuredOutputsParams(llguidance=grammar)
        asked = SamplingParams.create(structured_outputs=structured)
        return EngineRequest(request_id="r", prompt_token_ids=[5], params=asked, max_tokens=3, arrival_time_s=0.0)

    grammar = compile_grammar(StructuredOutputsParams(regex="ab"))
    patient = request(grammar)
    assert not waiting.ready(patient)
    now_s = 3600.0
    assert not waiting.ready(patient)
    monkeypatch.setattr(grammars, "BUILD_LIMIT_S", 0.01)

    def wait_for(grammar: str) -> None:
        while not waiting.ready(request(grammar)):
            waiting.wait()

    with pytest.raises(RequestError, match="processor time"):
        wait_for("busy")
    assert not waiting.ready(patient)
    go_on.set()
    wait_for(grammar)
