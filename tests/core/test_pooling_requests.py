"""Requests that want a vector: they end when their prompt is computed; an encoder's prompts are computed whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagemill.core.messages import EngineOutput, EngineRequest, StepResult
from pagemill.core.scheduler import Scheduler
from pagemill.params import FinishReason, SamplingParams
from tests.core.fakes import full


def wanted(name: str, length: int, pooling: str = "all", first: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(range(first, first + length)),
        params=SamplingParams(max_tokens=0),
        max_tokens=0,
        arrival_time_s=0.0,
        pooling=pooling,  # type: ignore[arg-type]
    )


def run(
    scheduler: Scheduler, *, non_finite: Sequence[str] = ()
) -> tuple[list[dict[str, int]], dict[str, EngineOutput]]:
    """What each step computes of whom, and the outputs; a vector is its request's name."""
    steps, outputs = [], {}
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        steps.append(dict(zip(plan.request_ids, plan.num_new_tokens, strict=True)))
        result = StepResult(
            token_ids=[[] for _ in plan.request_ids],
            pooled={name: name.encode() for name in plan.request_ids},
            non_finite=[name for name in plan.request_ids if name in non_finite],
        )
        outputs |= {output.request_id: output for output in scheduler.update(plan, result, 0.0)}
        scheduler.check_invariants()
    assert scheduler.stats().num_used_blocks == 0
    return steps, outputs


def encoder(**options: int) -> Scheduler:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "max_model_len": 20, **options}
    return Scheduler([full(32)], enable_prefix_caching=False, whole_prompts=True, **limits)


def test_a_vector_ends_its_request_and_no_token_comes() -> None:
    scheduler = encoder()
    scheduler.add(wanted("a", 5))
    steps, outputs = run(scheduler)
    assert steps == [{"a": 5}]
    assert (outputs["a"].pooled, outputs["a"].new_token_ids) == (b"a", [])
    assert outputs["a"].finish_reason is FinishReason.STOP


def test_whole_prompts_share_steps_in_order_of_arrival_up_to_budget_and_seats() -> None:
    scheduler = encoder()
    for name, length in (("a", 8), ("b", 8), ("c", 8), ("d", 2), ("e", 20), *((f"f{i}", 1) for i in range(6))):
        scheduler.add(wanted(name, length))
    steps, _ = run(scheduler)
    assert steps == [
        {"a": 8, "b": 8},
        {"c": 8, "d": 2},
        {"e": 20},
        {"f0": 1, "f1": 1, "f2": 1, "f3": 1},
        {"f4": 1, "f5": 1},
    ]


@pytest.mark.parametrize(("pooling", "cached"), [("last", 16), ("all", 0)])
def test_what_wants_every_token_takes_nothing_from_the_cache(pooling: str, cached: int) -> None:
    scheduler = Scheduler([full(32)], max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)
    for _ in range(2):
        scheduler.add(wanted("a", 18, pooling))
        steps, outputs = run(scheduler)
    assert outputs["a"].num_cached_tokens == cached
    assert sum(step["a"] for step in steps) == 18 - cached


def test_a_vector_that_is_no_number_fails_its_request_alone_by_name() -> None:
    scheduler = encoder()
    scheduler.add(wanted("a", 3))
    scheduler.add(wanted("b", 3, first=9))
    _, outputs = run(scheduler, non_finite=["a"])
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert "NaN or infinite values" in (outputs["a"].error or "")
    assert outputs["a"].pooled is None
    assert outputs["b"].pooled == b"b"


def test_an_abort_at_any_moment_leaves_nothing() -> None:
    scheduler = encoder()
    scheduler.add(wanted("a", 20))
    scheduler.add(wanted("b", 3))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.abort("a")
    assert scheduler.abort("b")
    assert scheduler.update(plan, StepResult(token_ids=[[]], pooled={"a": b"a"}), 0.0) == []
    scheduler.check_invariants()
    assert scheduler.stats().num_used_blocks == 0
