"""The engine's loop in its shortest form: a scheduler and an executor, until every request has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.core.messages import EngineRequest, SchedulerOutput, TokenLogprobs
from pagemill.core.scheduler import Scheduler
from pagemill.params import FinishReason, SamplingParams
from pagemill.worker.executor import InprocExecutor


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    vector: bytes | None = None
    num_cached_tokens: int = 0


def pooled(
    name: str, token_ids: Sequence[int], *, second_segment: int | None = None, last: bool = False
) -> EngineRequest:
    """A request for a vector."""
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(token_ids),
        params=SamplingParams(max_tokens=0),
        max_tokens=0,
        arrival_time_s=0.0,
        pooling="last" if last else "all",
        second_segment=second_segment,
    )


def request(name: str, prompt: Sequence[int], *, eos: tuple[int, ...] = (), **params: Any) -> EngineRequest:
    made = SamplingParams.create(**{"temperature": 0, "max_tokens": 12, **params})
    assert made.max_tokens is not None
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=made,
        max_tokens=made.max_tokens,
        arrival_time_s=0.0,
        eos_token_ids=eos,
        seed=made.seed or 0,
    )


def serve(
    executor: InprocExecutor,
    requests: Sequence[EngineRequest],
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    chunk: int = 0,
    caching: bool = True,
    scheduler: Scheduler | None = None,
    rows: list[int] | None = None,
) -> tuple[dict[str, Answer], Scheduler]:
    """All requests' answers, and the scheduler that made them. ``rows`` takes down each step's number of tokens."""
    scheduler = scheduler or Scheduler(
        executor.kv_specs,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=executor.max_model_len,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=caching and executor.model_config.causal,
        whole_prompts=not executor.model_config.causal,
    )
    answers = {entry.request_id: Answer() for entry in requests}
    for entry in requests:
        scheduler.add(entry)
    clock = 0.0
    while scheduler.has_work:
        clock += 1.0
        plan = scheduler.schedule(clock)
        assert plan is not None
        if rows is not None:
            rows.append(plan.total_num_tokens)
        result = executor.sample(plan, None, executor.execute(plan))
        for output in scheduler.update(plan, result, clock):
            answer = answers[output.request_id]
            answer.tokens += output.new_token_ids
            answer.logprobs += output.new_logprobs or []
            answer.prompt_logprobs += output.new_prompt_logprobs or []
            answer.vector, answer.num_cached_tokens = output.pooled, output.num_cached_tokens
            answer.finish_reason, answer.error = output.finish_reason or answer.finish_reason, output.error
    # The ids of ended requests travel with the next plan; there may be none from this scheduler.
    done = SchedulerOutput(
        step=0, request_ids=[], num_new_tokens=[], new_block_ids=[], finished_request_ids=list(answers)
    )
    executor.execute(done)
    scheduler.check_invariants()
    assert scheduler.stats().num_used_blocks == 0
    return answers, scheduler
