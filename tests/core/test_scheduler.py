"""Scheduling, step by step, with a worker that checks its paged memory."""

from __future__ import annotations

import random

import pytest

from pagemill.core.messages import StepResult
from pagemill.core.request import Request
from pagemill.core.scheduler import Scheduler
from pagemill.core.step_budget import StepBudget
from pagemill.errors import ConfigError, PromptTooLongError, RequestError
from pagemill.params import FinishReason
from tests.core.fakes import VOCAB, Engine, full, request, window

TWO_KINDS = [full(64), window(64, size=10)]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def alone(message, **options) -> list[int]:
    """The tokens a request gets with nobody beside it, no cache, no chunks."""
    engine = Engine([full(200)], enable_prefix_caching=False, **options)
    engine.add(message)
    engine.run()
    return engine.tokens[message.request_id]


def test_a_request_runs_to_its_token_limit_and_leaves_nothing_behind():
    engine = Engine([full(16)])
    engine.add(request("a", make_prompt(5), max_tokens=6))
    engine.run()
    assert len(engine.tokens["a"]) == 6
    assert engine.reasons["a"] is FinishReason.LENGTH
    assert engine.plans[0].num_new_tokens == [5]
    assert [plan.num_new_tokens for plan in engine.plans[1:]] == [[1]] * 5


def test_blocks_are_sent_once_then_only_new_ones():
    engine = Engine([full(16)])
    engine.add(request("a", make_prompt(5), max_tokens=6))
    engine.run()
    first, *later = engine.plans
    assert len(first.new_rows[0].block_ids[0]) == 2
    assert first.new_block_ids == [None]
    assert [plan.new_block_ids for plan in later] == [[None]] * 3 + [[[[2]]]] + [[None]]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16])
def test_a_repeated_prompt_is_found_except_for_its_last_token(length):
    prompt = make_prompt(length)
    engine = Engine([full(32)])
    engine.add(request("a", prompt))
    engine.run()
    engine.add(request("b", prompt))
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"]
    cached = (length - 1) // 4 * 4
    assert engine.outputs["b"][-1].num_cached_tokens == cached
    assert engine.worker.computed_by["b"] == engine.worker.computed_by["a"] - cached


def test_requests_for_the_same_prefix_at_once_compute_it_once():
    prefix = make_prompt(64)
    engine = Engine([full(100)], max_num_seqs=32, max_num_batched_tokens=32, max_model_len=128)
    engine.add(*(request(f"r{i}", prefix + make_prompt(3, seed=i), max_tokens=2) for i in range(20)))
    engine.run()
    assert engine.plans[0].request_ids == engine.plans[1].request_ids == ["r0"]
    assert engine.worker.num_computed_tokens == 64 + 20 * (3 + 1)
    for i in range(20):
        assert engine.tokens[f"r{i}"] == alone(request("x", prefix + make_prompt(3, seed=i), max_tokens=2))


def test_a_request_that_waits_for_a_prefix_lets_others_pass():
    prefix = make_prompt(16)
    engine = Engine([full(100)])
    engine.add(request("a", [*prefix, 1]), request("b", [*prefix, 2]), request("c", [3, 4, 5]))
    engine.step()
    assert engine.plans[0].request_ids == ["a", "c"]
    engine.step()
    assert engine.plans[1].request_ids == ["a", "c", "b"]


def test_hit_rate_counts_neither_recomputation_nor_requests_that_skip_the_cache():
    engine = Engine([full(8)], max_model_len=64)
    engine.add(*(request(f"r{i}", make_prompt(9, seed=i), max_tokens=16) for i in range(3)))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_query_tokens_total == 27
    assert stats.prefix_hit_tokens_total == 0
    engine.add(request("p", make_prompt(9, seed=0), prompt_logprobs=0))
    engine.run()
    assert engine.scheduler.stats().prefix_query_tokens_total == 27


@pytest.mark.parametrize(
    ("first", "second"),
    [({"salt": "x"}, {}), ({"salt": "x"}, {"salt": "y"}), ({"salt": "x"}, {"tenant": "x"}), ({"tenant": "x"}, {})],
)
def test_different_salts_and_tenants_share_nothing(first, second):
    prompt = make_prompt(16)
    engine = Engine([full(32)])
    engine.add(request("a", prompt, **first), request("b", prompt, **second))
    engine.run()
    assert engine.outputs["b"][-1].num_cached_tokens == 0
    engine.add(request("again", prompt, **first))
    engine.run()
    assert engine.outputs["again"][-1].num_cached_tokens == 12


def test_prompt_logprobs_are_complete_however_often_the_prompt_was_seen():
    prompt = make_prompt(17)
    engine = Engine([full(32)], long_prefill_token_threshold=5)
    for name in ("a", "b"):
        engine.add(request(name, prompt, prompt_logprobs=1))
        engine.run()
    for name in ("a", "b"):
        got = [c for output in engine.outputs[name] for c in output.new_prompt_logprobs or []]
        assert [candidates[0][0] for candidates in got] == prompt[1:]


def test_prompt_logprobs_are_not_sent_again_after_preemption():
    engine = Engine([full(8)], max_model_len=64)
    engine.add(*(request(f"r{i}", make_prompt(9, seed=i), max_tokens=16, prompt_logprobs=1) for i in range(3)))
    engine.run()
    assert engine.scheduler.stats().num_preemptions_total > 0
    for i in range(3):
        got = [c for output in engine.outputs[f"r{i}"] for c in output.new_prompt_logprobs or []]
        assert [candidates[0][0] for candidates in got] == make_prompt(9, seed=i)[1:]


def test_a_request_for_the_prompt_alone_samples_nothing():
    engine = Engine([full(16)], long_prefill_token_threshold=4)
    engine.add(request("a", make_prompt(10), max_tokens=0, prompt_logprobs=1))
    engine.run()
    assert engine.tokens["a"] == []
    assert engine.reasons["a"] is FinishReason.LENGTH
    assert sum(len(output.new_prompt_logprobs or []) for output in engine.outputs["a"]) == 9


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    engine = Engine([full(4)], max_model_len=100)
    with pytest.raises(PromptTooLongError, match="17 tokens, but the KV cache holds 16"):
        engine.add(request("a", make_prompt(17)))
    with pytest.raises(PromptTooLongError, match="100 tokens and 8 output tokens"):
        engine.add(request("a", make_prompt(100)))
    with pytest.raises(RequestError, match="empty"):
        engine.add(request("a", []))
    engine.add(request("a", make_prompt(16)))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", make_prompt(16)))
    engine.run()
    assert engine.reasons["a"] is FinishReason.LENGTH


def test_a_lone_request_that_outgrows_the_cache_ends_with_length():
    engine = Engine([full(4)], max_model_len=100)
    engine.add(request("a", make_prompt(10), max_tokens=50), request("b", make_prompt(3, seed=1)))
    engine.run()
    assert engine.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert len(engine.tokens["a"]) == 16 + 1 - 10
    assert len(engine.tokens["b"]) == 8


def test_the_context_length_ends_a_request():
    engine = Engine([full(64)], max_model_len=20)
    engine.add(request("a", make_prompt(15), max_tokens=50))
    engine.run()
    assert len(engine.tokens["a"]) == 5


def test_preempted_requests_return_first_and_do_not_thrash():
    engine = Engine([full(12)], max_num_batched_tokens=8, max_model_len=48)
    messages = [request(f"r{i}", make_prompt(14, seed=i), max_tokens=24) for i in range(6)]
    engine.add(*messages)
    while engine.step() is not None:
        waiting = engine.scheduler.waiting
        preempted = [r.num_preemptions > 0 for r in waiting]
        assert preempted == sorted(preempted, reverse=True)
    for message in messages:
        assert engine.tokens[message.request_id] == alone(message)
    assert 0 < engine.scheduler.stats().num_preemptions_total <= 12


def test_a_resumed_request_waits_until_all_of_it_fits():
    engine = Engine([full(10)], max_num_batched_tokens=8, max_model_len=40)
    engine.add(request("a", make_prompt(8), max_tokens=30), request("b", make_prompt(16, seed=1), max_tokens=12))
    resumed = []
    while (plan := engine.step()) is not None:
        resumed += [(plan.step, row.request_id) for row in plan.new_rows if row.num_prompt_tokens < len(row.token_ids)]
    assert [request_id for _, request_id in resumed] == ["b"]
    assert engine.scheduler.stats().num_preemptions_total == 1
    end_of_a = next(p.step for p in engine.plans if "a" in p.finished_request_ids)
    assert resumed[0][0] == end_of_a


def test_an_urgent_request_takes_the_place_of_the_worst():
    engine = Engine([full(8)], policy="priority", max_model_len=32)
    engine.add(request("low", make_prompt(12), priority=5), request("lower", make_prompt(12, seed=1), priority=9))
    engine.step()
    assert engine.plans[0].request_ids == ["low", "lower"]
    engine.add(request("urgent", make_prompt(12, seed=2), priority=0))
    plan = engine.step()
    assert plan.preempted_request_ids == ["lower"]
    assert plan.request_ids == ["low", "urgent"]
    engine.run()
    assert engine.tokens["lower"] == alone(request("x", make_prompt(12, seed=1)))


def test_an_urgent_request_takes_a_seat():
    engine = Engine([full(32)], policy="priority", max_num_seqs=1)
    engine.add(request("low", make_prompt(4), priority=1))
    engine.step()
    engine.add(request("same", make_prompt(4, seed=1), priority=1), request("high", make_prompt(4, seed=2)))
    plan = engine.step()
    assert plan.preempted_request_ids == ["low"]
    assert plan.request_ids == ["high"]
    engine.run()
    ends = [request_id for plan in engine.plans for request_id in plan.finished_request_ids]
    assert ends[:1] == ["high"]


def test_nobody_is_preempted_for_an_urgent_request_that_would_still_not_fit():
    engine = Engine([full(8)], policy="priority", max_model_len=32)
    engine.add(request("best", make_prompt(20), priority=0), request("low", make_prompt(4, seed=1), priority=9))
    engine.step()
    engine.add(request("large", make_prompt(16, seed=2), priority=5))
    plan = engine.step()
    assert plan.preempted_request_ids == []
    assert plan.request_ids == ["best", "low"]


def test_a_long_prompt_never_stalls_those_who_decode():
    engine = Engine([full(400)], max_num_batched_tokens=16, max_model_len=2000)
    engine.add(request("a", make_prompt(4), max_tokens=40), request("b", make_prompt(4, seed=1), max_tokens=40))
    engine.step()
    engine.add(request("long", make_prompt(1000, seed=2), max_tokens=1))
    for _ in range(20):
        plan = engine.step()
        assert plan.request_ids[:2] == ["a", "b"]
        assert plan.num_new_tokens == [1, 1, 14]


def shares_beside_a_decode(max_stall_s: float, token_s: float) -> list[int]:
    """Tokens of a long prompt in each step beside a request that decodes, where a token takes so long."""
    engine = Engine([full(4000)], max_num_batched_tokens=2048, max_model_len=10_000, max_stall_s=max_stall_s)
    engine.add(request("a", make_prompt(4), max_tokens=100))
    engine.step()
    engine.add(request("long", make_prompt(6000, seed=2), max_tokens=1))
    now_s, shares = 0.0, []
    while "long" not in engine.reasons:
        plan = engine.step(now_s=now_s, seconds=lambda plan: token_s * plan.total_num_tokens)
        assert dict(zip(plan.request_ids, plan.num_new_tokens, strict=True))["a"] == 1
        shares.append(plan.total_num_tokens - 1)
        now_s += 10.0
    return shares


def test_prompts_beside_decodes_are_cut_to_what_a_step_may_take():
    shares = shares_beside_a_decode(max_stall_s=0.1, token_s=0.0005)
    assert shares[0] == 256  # before any speed is known
    assert set(shares[1:-1]) <= {198, 199}


def test_a_slow_machine_still_gets_prompts_done():
    assert set(shares_beside_a_decode(max_stall_s=0.1, token_s=1.0)[1:-1]) == {1 + 64}  # its own, and the fewest


def test_without_a_limit_prompts_take_what_the_step_holds():
    assert shares_beside_a_decode(max_stall_s=0.0, token_s=0.0005)[:2] == [2047, 2047]


def test_nobody_who_decodes_means_whole_steps_of_prompt():
    engine = Engine([full(4000)], max_num_batched_tokens=2048, max_model_len=10_000, max_stall_s=0.1)
    engine.add(request("long", make_prompt(6000), max_tokens=1))
    shares = [engine.step(seconds=lambda plan: 0.01 * plan.total_num_tokens).total_num_tokens for _ in range(3)]
    assert shares == [2048, 2048, 1904]


def test_the_limit_follows_the_speed_of_the_last_steps():
    def decoding(count: int) -> list[Request]:
        requests = [Request(request("a", [1]), sequence=0, num_groups=1, max_total_tokens=9) for _ in range(count)]
        assert all(len(one.token_ids) - one.num_computed_tokens == 1 for one in requests)
        return requests

    budget = StepBudget(2048, 0.1)
    assert budget.begin(decoding(3), 0.0) == 3 + 256
    budget.end(1000, 0.2)
    assert budget.begin(decoding(3), 1.0) == 500
    budget.end(1000, 1.6)
    assert budget.begin(decoding(3), 2.0) == 250
    budget.end(3, 3.0)  # too few to tell
    assert budget.begin(decoding(3), 4.0) == 250
    budget.end(1000, 4.0)  # a clock that stood still
    assert budget.begin(decoding(300), 5.0) == 300 + 64
    assert budget.begin([], 6.0) == 2048


def test_several_prompts_are_computed_side_by_side():
    engine = Engine([full(400)], max_num_batched_tokens=32, long_prefill_token_threshold=10, max_model_len=2000)
    engine.add(*(request(f"r{i}", make_prompt(100, seed=i)) for i in range(4)))
    assert engine.step().num_new_tokens == [10, 10, 10, 2]
    engine.run()


def test_a_long_prompt_leaves_short_ones_behind_it_what_they_need_up_to_half():
    engine = Engine([full(400)], max_num_batched_tokens=16, max_model_len=2000)
    engine.add(request("long", make_prompt(1000), max_tokens=1))
    engine.step()
    engine.add(request("short", make_prompt(5, seed=1)), request("middle", make_prompt(30, seed=2)))
    shares = []
    for _ in range(7):
        plan = engine.step()
        shares.append(dict(zip(plan.request_ids, plan.num_new_tokens, strict=True)))
    assert shares == [
        {"long": 16},  # the others are seen now, and kept a share from the next step on
        {"long": 8, "short": 5, "middle": 3},
        {"long": 7, "short": 1, "middle": 8},
        {"long": 7, "short": 1, "middle": 8},
        {"long": 7, "short": 1, "middle": 8},
        {"long": 12, "short": 1, "middle": 3},
        {"long": 14, "short": 1, "middle": 1},
    ]


def test_an_urgent_long_prompt_leaves_nothing_to_those_it_outranks():
    engine = Engine([full(400)], max_num_batched_tokens=16, max_model_len=2000, policy="priority")
    engine.add(request("long", make_prompt(1000), max_tokens=1))
    engine.step()
    engine.add(request("short", make_prompt(5, seed=1), priority=3))
    assert [engine.step().num_new_tokens for _ in range(3)] == [[16]] * 3


def test_a_long_prompt_leaves_nothing_to_those_without_seat_or_blocks():
    for options in ({"max_num_seqs": 1}, {"num_blocks": 101}):
        pool = full(options.pop("num_blocks", 400))
        engine = Engine([pool], max_num_batched_tokens=16, max_model_len=400, **options)
        engine.add(request("long", make_prompt(390), max_tokens=1))
        engine.step()
        engine.add(request("short", make_prompt(20, seed=1)))
        assert [engine.step().num_new_tokens for _ in range(3)] == [[16]] * 3


def test_aborting_a_queued_request_frees_nothing_twice():
    engine = Engine([full(8)], max_num_seqs=1)
    engine.add(request("a", make_prompt(4)), request("b", make_prompt(4, seed=1)))
    engine.step()
    assert engine.scheduler.abort("b")
    assert not engine.scheduler.abort("b")
    engine.run()
    assert "b" not in engine.reasons


def test_aborting_while_the_worker_computes_frees_after_the_step():
    engine = Engine([full(8)])
    engine.add(request("a", make_prompt(9)), request("b", make_prompt(9, seed=1)))
    engine.step()

    def abort() -> None:
        held = engine.scheduler.kv.num_used_blocks
        assert engine.scheduler.abort("a")
        assert not engine.scheduler.abort("a")
        assert engine.scheduler.kv.num_used_blocks == held
        engine.scheduler.check_invariants()

    engine.step(between=abort)
    assert len(engine.outputs["a"]) == 1
    assert engine.scheduler.kv.num_used_blocks == 3
    assert engine.step().finished_request_ids == ["a"]
    engine.run()


def test_an_aborted_id_may_be_used_again_at_once():
    engine = Engine([full(16)])
    engine.add(request("a", make_prompt(9)))
    engine.step()
    engine.step(between=lambda: engine.scheduler.abort("a"))
    assert engine.scheduler.abort("a") is False
    engine.add(request("a", make_prompt(9, seed=3)))
    engine.run()
    assert engine.tokens["a"] == alone(request("x", make_prompt(9, seed=3)))


def test_aborting_between_steps_frees_at_once():
    engine = Engine([full(16)])
    engine.add(request("a", make_prompt(9)))
    engine.step()
    assert engine.scheduler.abort("a")
    assert engine.scheduler.kv.num_used_blocks == 0
    assert not engine.scheduler.has_work
    assert engine.step() is None


def test_a_request_with_non_finite_logits_ends_alone_and_its_cache_is_forgotten():
    engine = Engine([full(32)])
    prompt = make_prompt(13)
    engine.add(request("bad", prompt), request("good", make_prompt(5, seed=1)))
    engine.step()
    engine.worker.poisoned.add("bad")
    engine.run()
    assert engine.reasons == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert "NaN" in engine.outputs["bad"][-1].error
    engine.add(request("next", prompt))
    engine.run()
    assert engine.outputs["next"][-1].num_cached_tokens == 0


def test_a_request_that_allows_no_token_is_refused_by_its_parameters_and_its_cache_is_kept():
    engine = Engine([full(32)])
    prompt = make_prompt(13)
    engine.worker.stuck.add("stuck")
    engine.add(
        request("stuck", prompt, allowed_token_ids=[5], bad_words=["x"]), request("good", make_prompt(5, seed=1))
    )
    engine.run()
    assert engine.reasons == {"stuck": FinishReason.ERROR, "good": FinishReason.LENGTH}
    refused = engine.outputs["stuck"][-1]
    assert refused.error.startswith("allowed_token_ids and bad_words leave no token")
    assert (refused.error_status, refused.error_param) == (400, "allowed_token_ids")
    engine.add(request("next", prompt))
    engine.run()
    assert engine.outputs["next"][-1].num_cached_tokens == 12


def test_end_of_text_and_stop_tokens_end_a_request_and_stay_in_its_tokens():
    prompt = make_prompt(6)
    tokens = alone(request("x", prompt, max_tokens=30))
    ending = tokens[3]
    end = tokens.index(ending) + 1
    for options, stop_reason in (({"eos": (ending,)}, None), ({"stop_token_ids": (ending,)}, ending)):
        engine = Engine([full(32)])
        engine.add(request("a", prompt, max_tokens=30, **options))
        engine.run()
        assert engine.tokens["a"] == tokens[:end]
        assert engine.reasons["a"] is FinishReason.STOP
        assert engine.outputs["a"][-1].stop_reason == stop_reason
    engine = Engine([full(32)])
    engine.add(request("a", prompt, max_tokens=30, eos=(ending,), ignore_eos=True))
    engine.run()
    assert engine.tokens["a"] == tokens


def test_min_tokens_holds_back_every_ending_token():
    prompt = make_prompt(6)
    tokens = alone(request("x", prompt, max_tokens=30))
    ids = tuple(dict.fromkeys(tokens[:6]))
    engine = Engine([full(32)])
    engine.add(request("a", prompt, max_tokens=30, min_tokens=20, eos=ids[:2], stop_token_ids=ids[2:]))
    engine.run()
    assert len(engine.tokens["a"]) > 20
    assert not set(ids) & set(engine.tokens["a"][:20])


def test_a_worker_that_lets_an_ending_token_through_too_early_does_not_end_the_request():
    engine = Engine([full(32)])
    engine.worker.next_token = lambda row: 7  # type: ignore[method-assign]
    engine.add(request("a", make_prompt(6), max_tokens=9, min_tokens=4, eos=(7,)))
    engine.run()
    assert engine.tokens["a"] == [7] * 5
    assert engine.reasons["a"] is FinishReason.STOP


def test_more_requests_than_tokens_per_step_still_all_end():
    engine = Engine([full(64)], max_num_batched_tokens=2, max_num_seqs=8)
    engine.add(*(request(f"r{i}", make_prompt(5, seed=i), max_tokens=4) for i in range(6)))
    engine.run()
    assert all(len(tokens) == 4 for tokens in engine.tokens.values())


def test_slot_utilization_counts_shared_blocks_once():
    engine = Engine([full(64)])
    prefix = make_prompt(8)
    engine.add(request("a", [*prefix, 1]))
    engine.step()
    engine.add(request("b", [*prefix, 2]))
    engine.step()
    stats = engine.scheduler.stats()
    assert stats.num_used_blocks == 4
    assert (stats.allocated_slots, stats.filled_slots) == (16, 8 + 2 + 1)
    assert stats.slot_utilization == pytest.approx((9 / 12 + 11 / 16) / 2)


def test_an_unknown_policy_lists_those_that_exist():
    with pytest.raises(ConfigError, match="fcfs, priority"):
        Scheduler([full(4)], max_num_seqs=1, max_num_batched_tokens=1, max_model_len=8, policy="random")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64, 0])
@pytest.mark.parametrize("specs", [[full(200)], [full(16)], TWO_KINDS, [full(16), window(6, size=10)]])
def test_tokens_depend_on_nothing_but_the_request(caching, chunk, specs):
    rng = random.Random(chunk)
    messages = [
        request(f"r{i}", make_prompt(length, seed=i % 5), max_tokens=rng.randint(1, 50 - length), seed=i)
        for i, length in enumerate(rng.choices([1, 2, 4, 7, 8, 12, 33, 40], k=12))
    ]
    expected = {message.request_id: alone(message) for message in messages}
    rng.shuffle(messages)
    engine = Engine(
        specs, enable_prefix_caching=caching, long_prefill_token_threshold=chunk, max_num_batched_tokens=128
    )
    for message in messages:
        engine.add(message)
        if rng.random() < 0.5:
            engine.step()
    engine.run()
    assert engine.tokens == expected
    if specs == [full(16)]:
        assert engine.scheduler.stats().num_preemptions_total > 0


def test_nearly_all_slots_hold_tokens_when_64_requests_of_usual_lengths_run():
    scheduler = Scheduler([full(2000, block_size=16)], max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1024)
    rng = random.Random(0)
    for i in range(64):
        prompt, max_tokens = make_prompt(rng.randint(32, 256), seed=i), rng.randint(32, 256)
        scheduler.add(request(f"r{i}", prompt, max_tokens=max_tokens))
    while (plan := scheduler.schedule(0.0)) is not None:
        rows = {r.request_id: r for r in scheduler.running}
        ends = [
            rows[name].num_computed_tokens + count == len(rows[name].token_ids)
            for name, count in zip(plan.request_ids, plan.num_new_tokens, strict=True)
        ]
        scheduler.update(plan, StepResult(token_ids=[[7] if end else [] for end in ends]), 0.0)
    assert scheduler.stats().slot_utilization > 0.96
