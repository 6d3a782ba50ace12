"""What a row asks for is what it gets, and nothing of its neighbours."""

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch

from pagemill.params import LOGPROBS_MODES, SamplingParams
from pagemill.sampling.picker import Picker, TorchPicker
from pagemill.sampling.processors import Penalties
from pagemill.sampling.sampler import Sampled, Sampler
from pagemill.sampling.table import RowRequest
from tests.sampling.masks import Masked

VOCAB = 40
PICKERS: list[Picker] = [TorchPicker()]
if importlib.util.find_spec("pagemill._native") is not None:
    from pagemill.sampling.native import NativePicker

    PICKERS.append(NativePicker())


@pytest.fixture(params=PICKERS, ids=lambda picker: str(picker.name), autouse=True)
def picker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Picker:
    """Everything here holds for each way to pick."""
    monkeypatch.setattr("pagemill.sampling.sampler.TorchPicker", lambda: request.param)
    chosen: Picker = request.param
    return chosen


def request(
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    *,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> RowRequest:
    return RowRequest(
        params=SamplingParams.create(**params),
        seed=seed,
        token_ids=np.array(prompt + output, np.int32),
        num_prompt_tokens=len(prompt),
        eos_token_ids=eos,
        bad_words=bad_words,
    )


def run(
    requests: list[RowRequest],
    logits: torch.Tensor,
    positions: list[int] | None = None,
    mask: np.ndarray[Any, np.dtype[np.int32]] | None = None,
) -> Sampled:
    sampler = Sampler(len(requests), logits.shape[1])
    for row, entry in enumerate(requests):
        sampler.add(row, entry)
    rows = np.arange(len(requests))
    return sampler.sample(
        logits.clone(), rows, np.array(positions or [3] * len(requests)), None if mask is None else Masked(mask)
    )


def one(entry: RowRequest, logits: torch.Tensor, position: int = 3) -> int:
    return int(run([entry], logits[None], [position]).token_ids[0])


def ramp(**peaks: float) -> torch.Tensor:
    """Logits falling with the id, but for the peaks (t7=3.0)."""
    logits = -torch.arange(VOCAB, dtype=torch.float32) / 10
    for name, value in peaks.items():
        logits[int(name[1:])] = value
    return logits


def draws(entry_params: dict[str, Any], logits: torch.Tensor, count: int = 4000) -> np.ndarray[Any, Any]:
    """How often each token is drawn over seeds."""
    sampler = Sampler(count, len(logits))
    for row in range(count):
        sampler.add(row, request(seed=row, **entry_params))
    sampled = sampler.sample(logits.repeat(count, 1), np.arange(count), np.full(count, 3))
    return np.bincount(sampled.token_ids, minlength=len(logits))


def chi_square(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    keep = expected > 0
    return float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert one(request(temperature=0), ramp(t5=2.0, t9=2.0)) == 5


def test_rows_that_want_their_best_token_alone_need_no_logits() -> None:
    """Every kind that wants more says so; the rest may hold anything, here the highest of all at the wrong place."""
    plain = {"temperature": 0.0}
    requests = [
        request(**plain),
        request(temperature=1.0),
        request(**plain, logprobs=2),
        request(**plain, logprobs=0, logprob_token_ids=[3, 4]),
        request(**plain, repetition_penalty=1.3),
        request(eos=(9,), min_tokens=2, **plain),
        request(**plain, structured_outputs={"regex": "a+"}),
        request(**plain),
    ]
    logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(1))
    logits[7, 2] = torch.nan
    mask = np.full((len(requests), -(-VOCAB // 32)), -1, np.int32)
    mask[6, 0] = 1 << 20
    rows, positions = np.arange(len(requests)), np.full(len(requests), 3)
    found: list[Sampled] = []
    for told in (False, True):
        sampler = Sampler(len(requests), VOCAB)
        for row, entry in enumerate(requests):
            sampler.add(row, entry)
        read, given = sampler.reads(rows), logits.clone()
        assert read.tolist() == [False, *[True] * 6, False]
        extremes = TorchPicker().best(given) if told else None
        if told:
            given[~torch.from_numpy(read)] = 1e30 * torch.arange(VOCAB)
        found.append(sampler.sample(given, rows, positions, Masked(mask), extremes))
    want, got = found
    assert got.non_finite.tolist() == want.non_finite.tolist() == [False] * 7 + [True]
    assert got.token_ids[:7].tolist() == want.token_ids[:7].tolist()
    assert got.token_ids[6] == 20
    assert got.logprobs == want.logprobs


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert one(request(temperature=temperature), ramp(t5=500.0, t9=499.0)) == 5


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert draws({"top_p": 0.0001}, ramp(t5=0.1), 200)[5] == 200


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    counts = draws({"temperature": temperature}, ramp())
    expected = torch.softmax(ramp() / temperature, -1).numpy() * 4000
    assert chi_square(counts[expected > 5], expected[expected > 5]) < 80  # 39 degrees of freedom, p < 0.001


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = 1.0
    assert np.flatnonzero(draws({"top_k": 3}, logits)).tolist() == [0, 1, 7]


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_0_and_minus_1_are_off(off: int) -> None:
    assert np.count_nonzero(draws({"top_k": off, "repetition_penalty": 1.05}, torch.zeros(VOCAB))) == VOCAB


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]))
    assert np.flatnonzero(draws({"top_p": 0.79}, logits)).tolist() == [1, 2]
    assert np.flatnonzero(draws({"top_p": 0.85}, logits)).tolist() == [0, 1, 2]


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]))
    counts = draws({"top_k": 3, "top_p": 0.6}, logits)
    expected = np.array([0, 0.5, 0.3, 0, 0]) / 0.8 * 4000
    assert counts[[0, 3, 4]].sum() == 0
    assert chi_square(counts, expected) < 11


def test_top_p_over_a_vocabulary_that_needs_a_second_look() -> None:
    logits = torch.zeros(3000)
    counts = draws({"top_p": 0.5}, logits, 1500)
    assert counts[1500:].sum() == 0
    assert np.count_nonzero(counts) > 800


def test_min_p_keeps_a_fraction_of_the_best() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]))
    assert np.flatnonzero(draws({"min_p": 0.19}, logits)).tolist() == [0, 1, 2]


def test_the_same_seed_and_position_draw_the_same_token_and_others_do_not() -> None:
    logits = torch.zeros(VOCAB)
    assert one(request(seed=123), logits) == one(request(seed=123), logits)
    assert len({one(request(seed=seed), logits) for seed in range(50)}) > 20
    assert len({one(request(seed=1), logits, position) for position in range(50)}) > 20


def test_negative_and_huge_seeds_work() -> None:
    for seed in (-1, -(2**63), 2**64 - 1):
        assert 0 <= one(request(seed=seed), torch.zeros(VOCAB)) < VOCAB


def test_repetition_counts_prompt_and_output_and_handles_both_signs() -> None:
    logits = ramp(t1=1.0, t2=-1.0, t8=1.0)
    processor = Penalties(VOCAB)
    processor.add(0, request((1, 2), (8,), repetition_penalty=2.0))
    changed = logits[None].clone()
    processor.apply(changed, np.array([0]))
    assert changed[0, [1, 2, 8]].tolist() == [0.5, -2.0, 0.5]
    assert torch.equal(changed[0, 9:], logits[9:])


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    processor = Penalties(VOCAB)
    processor.add(0, request((1, 2), (8, 8), presence_penalty=0.5, frequency_penalty=0.25))
    processor.accept(np.array([0]), np.array([9]))
    processor.apply(logits, np.array([0]))
    assert logits[0, [1, 2, 8, 9]].tolist() == [0.0, 0.0, -1.0, -0.75]


def test_penalties_survive_being_preempted() -> None:
    logits = ramp(t30=0.3)
    running = Sampler(1, VOCAB)
    running.add(0, request(temperature=0, frequency_penalty=0.1, repetition_penalty=1.1))
    produced: list[int] = []
    for step in range(30):
        token = int(running.sample(logits[None].clone(), np.array([0]), np.array([3 + step])).token_ids[0])
        entry = request(output=tuple(produced), temperature=0, frequency_penalty=0.1, repetition_penalty=1.1)
        assert one(entry, logits, 3 + step) == token
        produced.append(token)
    assert len(set(produced)) > 3


def test_penalised_ids_outside_the_vocabulary_are_ignored() -> None:
    assert one(request((1, VOCAB + 5), temperature=0, repetition_penalty=2.0), ramp(t4=3.0)) == 4


def test_min_tokens_holds_back_every_end_until_enough_is_out() -> None:
    logits = ramp(t20=9.0, t21=8.0, t22=7.0, t5=1.0)
    sampler = Sampler(1, VOCAB)
    sampler.add(0, request(temperature=0, min_tokens=2, stop_token_ids=[22], eos=(20, 21)))
    tokens = [
        int(sampler.sample(logits[None].clone(), np.array([0]), np.array([3 + i])).token_ids[0]) for i in range(3)
    ]
    assert tokens == [5, 5, 20]


def test_min_tokens_counts_what_was_produced_before_a_preemption() -> None:
    assert one(request(output=(5, 5), temperature=0, min_tokens=2, eos=(20,)), ramp(t20=9.0)) == 20
    assert one(request(output=(5,), temperature=0, min_tokens=2, eos=(20,)), ramp(t20=9.0)) == 0


def test_logit_bias_is_added() -> None:
    assert one(request(temperature=0, logit_bias={9: 5.0, 0: -100.0, VOCAB + 3: 100.0}), ramp()) == 9


def test_only_allowed_tokens_are_produced() -> None:
    counts = draws({"allowed_token_ids": [4, 9, 9, VOCAB + 1]}, ramp(), 500)
    assert np.flatnonzero(counts).tolist() == [4, 9]


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert one(request(temperature=0, bad_words=((5,),)), ramp(t5=9.0)) == 0


def test_a_longer_bad_word_is_cut_before_its_last_token() -> None:
    logits = ramp(t5=9.0, t6=3.0)
    words = ((5, 5, 5), (6, 6))
    sampler = Sampler(1, VOCAB)
    sampler.add(0, request(temperature=0, bad_words=words))
    tokens = [
        int(sampler.sample(logits[None].clone(), np.array([0]), np.array([3 + i])).token_ids[0]) for i in range(6)
    ]
    assert tokens == [5, 5, 6, 5, 5, 6]


def test_a_bitmask_allows_the_set_bits() -> None:
    mask = np.zeros((2, 2), np.int32)
    mask[0, 1] = 1 << 2  # token 34
    mask[1] = -1
    assert run([request(temperature=0)] * 2, ramp().repeat(2, 1), mask=mask).token_ids.tolist() == [34, 0]


def test_a_row_with_no_token_left_fails_alone() -> None:
    mask = np.zeros((2, 2), np.int32)
    mask[1] = -1
    sampled = run([request(), request(temperature=0)], ramp().repeat(2, 1), mask=mask)
    assert sampled.nothing_allowed.tolist() == [True, False]
    assert not sampled.non_finite.any()
    assert sampled.token_ids[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_forbid_every_token_are_no_fault_of_the_model(temperature: float) -> None:
    stuck = request(temperature=temperature, allowed_token_ids=[5], bad_words=((5,),), logprobs=1)
    broken = ramp()
    broken[3] = math.nan
    sampled = run([stuck, request(temperature=0), stuck], torch.stack([ramp(), ramp(), broken]))
    assert sampled.nothing_allowed.tolist() == [True, False, False]
    assert sampled.non_finite.tolist() == [False, False, True]
    assert sampled.token_ids[1] == 0


def test_masked_rows_get_the_same_tokens_whether_or_not_others_need_their_logits_written() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    mask = np.random.default_rng(3).integers(-(2**31), 2**31, (4, -(-VOCAB // 32)), np.int32)
    mask[1] = 0
    greedy = request(temperature=0)
    alone = run([greedy] * 4, logits, mask=mask)
    for other in (request(seed=1), request(temperature=0, logprobs=1), request(temperature=0, bad_words=((1,),))):
        beside = run([greedy] * 3 + [other], logits, mask=mask)
        assert beside.token_ids[[0, 2]].tolist() == alone.token_ids[[0, 2]].tolist()
        assert beside.nothing_allowed[:3].tolist() == alone.nothing_allowed[:3].tolist() == [False, True, False]


def test_a_greedy_row_whose_best_token_is_allowed_needs_no_mask() -> None:
    mask = np.full((4, 2), -2, np.int32)  # all but token 0 and 32
    sampler = Sampler(4, VOCAB)
    kinds = [request(temperature=0), request(temperature=0), request(seed=1), request(temperature=0, bad_words=((1,),))]
    for row, entry in enumerate(kinds):
        sampler.add(row, entry)
    logits = ramp().repeat(4, 1)  # falling: token 0 is the best
    logits[1, 3] = 99.0
    masked = Masked(mask)
    sampled = sampler.sample(logits, np.arange(4), np.full(4, 3), masked)
    assert sorted(masked.written) == [0, 2, 3]
    assert sampled.token_ids[[0, 1]].tolist() == [1, 3]
    assert not {0, 32} & set(sampled.token_ids.tolist())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_row_is_named_and_hurts_no_other(poison: float) -> None:
    entries = [request(seed=i, top_p=0.9, logprobs=2, frequency_penalty=0.1) for i in range(3)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    clean = run(entries, logits)
    logits[1, 7] = poison
    sampled = run(entries, logits)
    assert sampled.non_finite.tolist() == [False, True, False]
    assert sampled.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert clean.logprobs is not None
    assert sampled.logprobs is not None
    assert [sampled.logprobs[0], sampled.logprobs[2]] == [clean.logprobs[0], clean.logprobs[2]]


def test_logprobs_are_raw_ranked_and_chosen_first() -> None:
    logits = ramp(t5=1.0)
    sampled = run([request(temperature=0, logprobs=2, allowed_token_ids=[3])], logits[None])
    assert sampled.logprobs is not None
    entry = sampled.logprobs[0]
    assert entry is not None
    expected = torch.log_softmax(logits, -1)
    assert [(token, rank) for token, _, rank in entry] == [(3, 5), (5, 1), (0, 2)]
    assert [value for _, value, _ in entry] == pytest.approx(expected[[3, 5, 0]].tolist())


def test_logprobs_only_for_those_who_asked() -> None:
    sampled = run([request(), request(logprobs=0), request()], ramp().repeat(3, 1))
    assert sampled.logprobs is not None
    assert [entry if entry is None else len(entry) for entry in sampled.logprobs] == [None, 1, None]
    assert run([request()], ramp()[None]).logprobs is None


def test_logprobs_are_finite_numbers() -> None:
    sampled = run([request(temperature=0, logprobs=5)], ramp(t0=3e38, t1=-3e38)[None])
    assert sampled.logprobs is not None
    entry = sampled.logprobs[0]
    assert entry is not None
    assert all(-9999.0 <= value <= 0 for _, value, _ in entry)


def mixed(count: int) -> list[RowRequest]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 2.0, "logprobs": 3},
        {"top_k": 1},
        {"top_k": 5, "top_p": 0.9},
        {"top_p": 0.8, "temperature": 0.7, "logprobs": 0},
        {"min_p": 0.1, "frequency_penalty": 0.5},
        {"logit_bias": {3: 2.0}, "min_tokens": 3, "stop_token_ids": [2]},
        {"allowed_token_ids": [1, 5, 9, 11]},
        {},
    ]
    return [request(tuple(range(1, 2 + i % 7)), (3, 4)[: i % 3], seed=i, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("vocab", [VOCAB, 49152, 1001])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(vocab: int) -> None:
    entries = mixed(18)
    logits = torch.randn(18, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    together = run(entries, logits, list(range(18)))
    order = np.random.default_rng(0).permutation(18)
    shuffled = run([entries[i] for i in order], logits[torch.from_numpy(order)], order.tolist())
    assert together.logprobs is not None
    assert shuffled.logprobs is not None
    for place, i in enumerate(order.tolist()):
        alone = run([entries[i]], logits[i : i + 1], [i])
        expected = int(together.token_ids[i]), together.logprobs[i]
        assert (int(alone.token_ids[0]), alone.logprobs and alone.logprobs[0]) == expected
        assert (int(shuffled.token_ids[place]), shuffled.logprobs[place]) == expected


def test_a_reused_row_keeps_nothing_of_its_last_request() -> None:
    sampler = Sampler(1, VOCAB)
    sampler.add(0, request(logit_bias={9: 100.0}, min_tokens=5, eos=(0,), bad_words=((0,),), logprobs=1))
    sampler.remove(0)
    sampler.add(0, request(temperature=0))
    sampled = sampler.sample(ramp()[None], np.array([0]), np.array([3]))
    assert sampled.token_ids.tolist() == [0]
    assert sampled.logprobs is None


def test_each_logprobs_mode_reports_what_it_says() -> None:
    logits = ramp(t5=3.0, t7=2.0)
    drawn = {"temperature": 0.5, "top_k": 2, "seed": 4, "logprobs": 3, "presence_penalty": 1.0}
    rows = [request(output=(5,), **drawn, logprobs_mode=mode) for mode in LOGPROBS_MODES]
    rows.append(
        request(output=(5,), temperature=0.0, logprobs=3, presence_penalty=1.0, logprobs_mode=LOGPROBS_MODES[2])
    )
    sampled = run(rows, logits.repeat(5, 1))
    assert sampled.logprobs is not None
    assert len(set(sampled.token_ids[:4].tolist())) == 1
    penalised = logits.clone()
    penalised[5] -= 1.0
    kept = penalised / 0.5
    kept[[token for token in range(VOCAB) if token not in (5, 7)]] = -torch.inf
    expected = [logits.log_softmax(0), logits, kept.log_softmax(0), kept, penalised.log_softmax(0)]
    for entries, values in zip(sampled.logprobs, expected, strict=True):
        assert entries is not None
        assert len(entries) == 4
        for token, value, rank in entries:
            assert value == pytest.approx(max(float(values[token]), -9999.0), abs=1e-5)
            assert rank == 1 + int((values > values[token]).sum())


def test_the_engine_s_mode_holds_where_a_request_names_none_and_for_prompts() -> None:
    logits = torch.stack([ramp(t5=3.0)] * 2)
    sampler = Sampler(2, VOCAB, logprobs_mode="raw_logits")
    sampler.add(0, request(logprobs=0))
    sampler.add(1, request(logprobs=0, logprobs_mode="raw_logprobs"))
    sampled = sampler.sample(logits.clone(), np.arange(2), np.array([3, 3]))
    assert sampled.logprobs is not None
    values = [entries[0][1] for entries in sampled.logprobs if entries is not None]
    chosen = sampled.token_ids.tolist()
    assert values == pytest.approx([float(logits[0][chosen[0]]), float(logits[1].log_softmax(0)[chosen[1]])], abs=1e-5)
    (prompt, _) = sampler.logprobs(logits, np.array([7, 5]), 1)
    assert prompt == [(7, pytest.approx(-0.7), 8), (5, 3.0, 1)]


def test_listed_tokens_are_reported_in_place_of_the_best() -> None:
    logits = ramp(t5=3.0)
    listed = request(temperature=0.0, logprobs=2, logprob_token_ids=[9, 5, 0])
    sampled = run([listed, request(temperature=0.0, logprobs=2)], logits.repeat(2, 1))
    assert sampled.logprobs is not None
    first, second = sampled.logprobs
    assert first is not None
    assert second is not None
    expected = logits.log_softmax(0)
    assert [(token, rank) for token, _, rank in first] == [(5, 1), (9, 10), (5, 1), (0, 2)]
    assert [value for _, value, _ in first] == pytest.approx([float(expected[t]) for t in (5, 9, 5, 0)], abs=1e-5)
    assert len(second) == 3
