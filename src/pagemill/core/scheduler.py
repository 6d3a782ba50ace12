"""What is computed in each step: the state machine between the front's requests and the worker's steps.

Owns the waiting queue, the running list, and every request's progress. Pure: no clock (times are passed in), no I/O,
no tensors. Does not know how blocks are found or kept (kv_cache) nor who goes first (policy).

One step, in order::

    schedule(now) -> plan
        1. push aside       a waiting request that strictly outranks running ones may take their place
        2. advance running  in policy order, one token at least for each: decodes need one, prompts take chunks of
                            what is left, a long one at most half of it while others could go on; beside decodes
                            there is no more than can be computed in max_stall_s; when blocks run out the policy's
                            victim is preempted (recomputed later)
        3. admit waiting    while its whole need fits beside what was promised to those admitted before
    worker computes the plan
    update(plan, result) -> outputs
        4. count computed tokens, publish full blocks, drop those behind windows
        5. accept tokens, end requests, free blocks

There are no phases: ``num_computed_tokens`` catches up with ``token_ids``; when it has, a token is sampled.

One step is in flight at most. schedule() reads counts, never a sampled token's value, and blocks in flight are freed by
update() alone; so planning step t + 1 before t is updated needs only a queue of flights, and rows that count the token
they are about to get.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter

from pagemill.core import failures
from pagemill.core.block_pool import Block
from pagemill.core.kv_cache import KVCacheManager, KVCacheSpec
from pagemill.core.messages import (
    EngineOutput,
    EngineRequest,
    NewRow,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
)
from pagemill.core.policy import Policy, create_policy
from pagemill.core.request import Request, RequestStatus
from pagemill.core.slot_usage import SlotUsage
from pagemill.core.step_budget import StepBudget
from pagemill.errors import PromptTooLongError, RequestError

__all__ = ["Scheduler"]

WAITING, RUNNING, FINISHED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED
_order = attrgetter("order")


class _Plan:
    """A step under construction: the columns of its SchedulerOutput, and the requests behind the rows."""

    __slots__ = ("budget", "computing", "counts", "new_blocks", "new_rows", "preempted", "requests")

    def __init__(self) -> None:
        self.budget = 0
        """Tokens that may still be scheduled."""
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.new_blocks: list[list[list[int]] | None] = []
        self.new_rows: list[NewRow] = []
        self.preempted: list[str] = []
        self.computing: set[bytes] = set()
        """Hashes of the prompt blocks that this step computes, wholly or in part."""


class Scheduler:
    """Add and abort requests at any time; call schedule and update in turn."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int = 0,
        max_stall_s: float = 0.0,
        policy: str | Policy = "fcfs",
        enable_prefix_caching: bool = True,
        whole_prompts: bool = False,
    ) -> None:
        """``max_stall_s``: see :class:`StepBudget`; ``whole_prompts``: in one step or not yet (an encoder's)."""
        self.whole_prompts = whole_prompts
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each running request gets a token per step
        self.max_num_batched_tokens = max_num_batched_tokens
        self._budget = StepBudget(max_num_batched_tokens, max_stall_s)
        self.max_model_len = max_model_len
        self.policy = create_policy(policy) if isinstance(policy, str) else policy
        chunk = min(long_prefill_token_threshold or max_num_batched_tokens, max_num_batched_tokens)
        self.kv = KVCacheManager(specs, enable_prefix_caching, max_model_len=max_model_len, max_chunk=chunk)
        self.waiting: list[Request] = []
        """Best first."""
        self.running: list[Request] = []
        """Best first. All of them have a row in the worker."""
        self._requests: dict[str, Request] = {}
        self._next_up: list[Request] = []
        """Waiting requests that the last step had seats and blocks for, but no budget."""
        self._flight: list[Request] | None = None
        """The requests of the step that was scheduled and not yet updated."""
        self._aborted_in_flight: list[Request] = []
        self._finished_ids: list[str] = []
        """Rows that the worker may drop, for the next plan."""
        self._step = 0
        self._num_added = 0
        self._query_tokens = self._hit_tokens = self._num_preemptions = 0
        self._slots = SlotUsage(self.kv)

    # ---- in and out -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether schedule() or update() has something to do."""
        return bool(self.waiting or self.running or self._flight is not None)

    def add(self, message: EngineRequest) -> None:
        """Queue a request. Raises :class:`PromptTooLongError` with the numbers if it can never be computed."""
        self._refuse_impossible(message)
        num_prompt = len(message.prompt_token_ids)
        request = Request(
            message,
            sequence=self._num_added,
            num_groups=len(self.kv.specs),
            # One more than the cache holds: the last token's own KV is never needed.
            max_total_tokens=min(num_prompt + message.max_tokens, self.max_model_len, self.kv.max_request_tokens + 1),
        )
        self._num_added += 1
        self.kv.prefix_cache.open(request)
        request.order = self.policy.order(request, message.arrival_time_s)
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=_order)

    def _refuse_impossible(self, message: EngineRequest) -> None:
        num_prompt = len(message.prompt_token_ids)
        if message.request_id in self._requests:
            raise RequestError(f"request id {message.request_id!r} is in use; choose another", param="request_id")
        if num_prompt == 0:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        room = self.max_model_len - min(1, message.max_tokens)
        if num_prompt > room:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and {message.max_tokens} output tokens are asked for, but the "
                f"context holds {self.max_model_len}; shorten the prompt or raise --max-model-len",
                param="prompt",
            )
        if not self.kv.fits_ever(num_prompt):
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens, but the KV cache holds {self.kv.max_request_tokens} for one "
                "request; shorten the prompt or raise --kv-cache-memory-bytes",
                param="prompt",
            )

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it stands; False if it is unknown or has ended. No output follows for it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if request.status is RUNNING:
            self.running.remove(request)
            self._finished_ids.append(request_id)
            if self._flight is None:
                self.kv.free(request)
            else:  # the worker may be writing its blocks: they are free once the step is done
                self._aborted_in_flight.append(request)
        else:
            self._leave_queue(request)
        request.status = FINISHED
        return True

    def _leave_queue(self, request: Request) -> None:
        index = bisect_left(self.waiting, request.order, key=_order)
        assert self.waiting[index] is request
        del self.waiting[index]

    # ---- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to compute."""
        assert self._flight is None, "the step before has not been updated"
        if not self.running and not self.waiting:
            return None
        if self.policy.dynamic:
            self._reorder(now_s)
        self._step += 1
        plan = _Plan()
        if self.waiting:
            self._push_aside(plan)
        plan.budget = self._budget.begin(self.running, now_s)
        self._advance_running(plan)
        self._next_up = []
        if self.waiting and len(self.running) < self.max_num_seqs:
            self._admit(plan)
        assert plan.requests, "requests are waiting and none can go on"
        self._flight = plan.requests
        num_tokens = sum(plan.counts)
        self._slots.measure(plan.requests, num_tokens)
        finished, self._finished_ids = self._finished_ids, []
        return SchedulerOutput(
            step=self._step,
            request_ids=[request.request_id for request in plan.requests],
            num_new_tokens=plan.counts,
            new_block_ids=plan.new_blocks,
            new_rows=plan.new_rows,
            finished_request_ids=finished,
            preempted_request_ids=plan.preempted,
            total_num_tokens=num_tokens,
        )

    def _reorder(self, now_s: float) -> None:
        for queue in (self.waiting, self.running):
            for request in queue:
                request.order = self.policy.order(request, now_s)
            queue.sort(key=_order)

    def _push_aside(self, plan: _Plan) -> None:
        """Preempt worse running requests for the best waiting one, if that gets it in."""
        head, running, outranks = self.waiting[0], self.running, self.policy.outranks
        while running and outranks(head, victim := self.policy.victim(running)):
            hit = self.kv.prefix_cache.match(head)
            has_seat = len(running) < self.max_num_seqs
            if has_seat and self._fits(head, hit, self._promised()):
                return
            worse = [request for request in running if outranks(head, request)]
            if not self._could_fit(head, hit, worse):
                return
            self._preempt(victim, plan)

    def _advance_running(self, plan: _Plan) -> None:
        """Give every running request its next tokens; each later one is kept a token of the budget."""
        running, max_chunk, budget = self.running, self.kv.max_chunk, plan.budget
        requests, counts, new_blocks = plan.requests, plan.counts, plan.new_blocks
        index = 0
        while index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            count = len(request.token_ids) - computed
            if count > 1:
                left = budget - (len(running) - index - 1)
                count = min(count, max_chunk, left)
                if count == left:
                    count -= self._kept_for_others(request, index, left // 2)
            added = None
            if computed + count > request.capacity:
                added = self._make_room(request, computed + count, index, plan)
                if added is None:
                    continue  # it was preempted: the next one stands at this index now
            if computed < request.num_prompt_tokens:
                self._note_computing(request, count, plan)
            requests.append(request)
            counts.append(count)
            new_blocks.append(added)
            budget -= count
            index += 1
        plan.budget = budget

    def _kept_for_others(self, request: Request, index: int, most: int) -> int:
        """Tokens, up to ``most``, that a long prompt leaves to shorter ones behind it which it does not outrank."""
        wanted = 0
        for other in (*self.running[index + 1 :], *self._next_up):
            if wanted >= most:
                return most
            if not self.policy.outranks(request, other):
                wanted += len(other.token_ids) - other.num_computed_tokens - (other.status is RUNNING)
        return min(most, wanted)

    def _make_room(self, request: Request, num_tokens: int, index: int, plan: _Plan) -> list[list[int]] | None:
        """New blocks for a running request, at the cost of those after it; None if it was preempted itself."""
        while (added := self.kv.allocate(request, num_tokens)) is None:
            victim = self.policy.victim(self.running[index:])
            self._preempt(victim, plan)
            if victim is request:
                return None
        return added

    def _preempt(self, request: Request, plan: _Plan) -> None:
        """Back to the queue without blocks. What it had published may still be there when it resumes."""
        self.running.remove(request)
        self.kv.free(request)
        request.status = WAITING
        request.num_preemptions += 1
        request.preempted_at_step = self._step
        insort(self.waiting, request, key=_order)
        plan.preempted.append(request.request_id)
        self._num_preemptions += 1

    def _admit(self, plan: _Plan) -> None:
        """Start waiting requests in order, while there are seats, budget and blocks.

        One whose next block is being computed in this very step waits for it, and lets others pass.
        """
        waiting, promised = self.waiting, self._promised()
        passed = 0
        while plan.budget > 0 and passed < len(waiting) and len(self.running) + passed < self.max_num_seqs:
            request = waiting[passed]
            if request.preempted_at_step == self._step:
                break
            hit = self.kv.prefix_cache.match(request)
            if self._is_being_computed(request, len(hit[0]), plan):
                passed += 1
                continue
            if self.whole_prompts and len(request.token_ids) > plan.budget:
                break
            if not self._fits(request, hit, promised):
                break
            del waiting[passed]
            self._start(request, hit, plan)
            promised = [a + b for a, b in zip(promised, self.kv.outstanding(request), strict=True)]
        seats = self.max_num_seqs - len(self.running) - passed
        if plan.budget == 0 and seats > 0 and passed < len(waiting):
            head = waiting[passed]
            if self._fits(head, self.kv.prefix_cache.match(head), promised):
                self._next_up = waiting[passed : passed + seats]

    def _start(self, request: Request, hit: list[list[Block]], plan: _Plan) -> None:
        kv = self.kv
        kv.claim(request, hit)
        computed = request.num_computed_tokens
        if request.num_preemptions == 0 and request.reads_cache and kv.prefix_cache.enabled:
            self._query_tokens += request.num_prompt_tokens
            self._hit_tokens += computed
            request.num_cached_tokens = computed
        count = min(len(request.token_ids) - computed, kv.max_chunk, plan.budget)
        added = kv.allocate(request, computed + count)
        assert added is not None, f"{request} was found to fit and does not"
        self._note_computing(request, count, plan)
        request.status = RUNNING
        insort(self.running, request, key=_order)
        plan.requests.append(request)
        plan.counts.append(count)
        plan.new_blocks.append(None)
        plan.new_rows.append(request.new_row())
        plan.budget -= count

    # ---- who fits ---------------------------------------------------------------------------------------------------

    def _fits(self, request: Request, hit: list[list[Block]], promised: list[int]) -> bool:
        """Whether all the tokens it has fit beside what others were promised, with some room to grow.

        The room is a block for each running request, two for one that was preempted before: else it would come back
        only to be preempted again, its prompt computed in vain.
        """
        spare = 0
        if self.running and not self.policy.outranks(request, self.running[-1]):
            spare = len(self.running) * (2 if request.num_preemptions else 1)
        return all(
            need + taken + spare <= pool.num_free
            for need, taken, pool in zip(self.kv.shortfall(request, hit), promised, self.kv.pools, strict=True)
        )

    def _could_fit(self, request: Request, hit: list[list[Block]], worse: list[Request]) -> bool:
        """Whether it may fit once all of ``worse`` are preempted."""
        needs = self.kv.shortfall(request, hit)
        return all(
            need
            <= pool.num_free + sum(len(other.block_tables[group]) - other.num_skipped_blocks[group] for other in worse)
            for group, (need, pool) in enumerate(zip(needs, self.kv.pools, strict=True))
        )

    def _promised(self) -> list[int]:
        """Per group, blocks that running requests will still take for the tokens they have."""
        promised = [0] * len(self.kv.pools)
        for request in self.running:
            if len(request.token_ids) > request.capacity:
                promised = [a + b for a, b in zip(promised, self.kv.outstanding(request), strict=True)]
        return promised

    def _note_computing(self, request: Request, count: int, plan: _Plan) -> None:
        size, start = self.kv.block_size, request.num_computed_tokens
        plan.computing.update(request.block_hashes[start // size : -(-(start + count) // size)])

    def _is_being_computed(self, request: Request, num_hit_blocks: int, plan: _Plan) -> bool:
        """Whether a request of this step computes the very block that this one needs next."""
        usable = min(len(request.block_hashes), (len(request.token_ids) - 1) // self.kv.block_size)
        return (
            request.reads_cache and num_hit_blocks < usable and request.block_hashes[num_hit_blocks] in plan.computing
        )

    # ---- update -----------------------------------------------------------------------------------------------------

    def update(self, plan: SchedulerOutput, result: StepResult, now_s: float) -> list[EngineOutput]:
        """Take in what the worker computed (``result``'s lists are consumed); what is new for the front."""
        flight, self._flight = self._flight, None
        assert flight is not None
        self._budget.end(plan.total_num_tokens, now_s)
        assert plan.step == self._step, f"step {plan.step} is updated, but step {self._step} was scheduled last"
        non_finite, prompt_logprobs, logprobs = result.non_finite, result.prompt_logprobs, result.logprobs
        outputs: list[EngineOutput] = []
        ended = False
        for row, (request, count, sampled) in enumerate(
            zip(flight, plan.num_new_tokens, result.token_ids, strict=True)
        ):
            if request.status is not RUNNING:
                continue  # aborted while the worker computed it
            computed = request.num_computed_tokens = request.num_computed_tokens + count
            if non_finite and request.request_id in non_finite:
                self.kv.prefix_cache.forget(request)  # what it cached may be no numbers either
                outputs.append(failures.non_finite(request))
                self._end(request)
                ended = True
                continue
            if computed >= request.settle_at:
                self.kv.settle(request)
            if result.nothing_allowed and request.request_id in result.nothing_allowed:
                outputs.append(failures.nothing_allowed(request))
                self._end(request)
                ended = True
                continue
            prompt_part = None
            if prompt_logprobs:
                prompt_part = request.unsent_prompt_logprobs(count, prompt_logprobs.get(request.request_id))
            if computed < len(request.token_ids):
                if prompt_part:
                    outputs.append(
                        EngineOutput(request_id=request.request_id, new_token_ids=[], new_prompt_logprobs=prompt_part)
                    )
                continue
            reason = request.accept(sampled)
            output = EngineOutput(
                request_id=request.request_id,
                new_token_ids=sampled,
                new_logprobs=logprobs[row] if logprobs else None,
                new_prompt_logprobs=prompt_part,
                num_cached_tokens=request.num_cached_tokens,
                pooled=result.pooled.get(request.request_id),
            )
            if reason is not None:
                output.finish_reason = reason
                output.stop_reason = request.stop_reason(reason)
                if output.new_logprobs:
                    output.new_logprobs = output.new_logprobs[: len(sampled)]
                self._end(request)
                ended = True
            outputs.append(output)
        if ended:
            self.running = [request for request in self.running if request.status is RUNNING]
        for request in self._aborted_in_flight:
            self.kv.free(request)
        self._aborted_in_flight.clear()
        return outputs

    def _end(self, request: Request) -> None:
        request.status = FINISHED
        del self._requests[request.request_id]
        self._finished_ids.append(request.request_id)
        self.kv.free(request)

    # ---- watching ---------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Queues and cache now, totals since the start."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=self.kv.num_blocks,
            num_used_blocks=self.kv.num_used_blocks,
            kv_cache_usage=self.kv.usage,
            prefix_query_tokens_total=self._query_tokens,
            prefix_hit_tokens_total=self._hit_tokens,
            num_preemptions_total=self._num_preemptions,
            allocated_slots=self._slots.allocated,
            filled_slots=self._slots.filled,
            slot_utilization=self._slots.mean,
        )

    def check_invariants(self) -> None:
        """Assert everything that must hold between calls. Slow: for tests, and on idle in debug mode."""
        running, waiting, size = self.running, self.waiting, self.kv.block_size
        assert {r.request_id: r for r in (*running, *waiting)} == self._requests
        assert len(self._requests) == len(running) + len(waiting)
        assert len(running) <= self.max_num_seqs
        for queue, status in ((running, RUNNING), (waiting, WAITING)):
            assert all(request.status is status for request in queue)
            assert all(a.order < b.order for a, b in pairwise(queue))
        for request in waiting:
            assert request.num_computed_tokens == request.capacity == 0
            assert not any(request.block_tables)
        for request in self._requests.values():
            assert len(request.token_ids) < request.max_total_tokens or request.num_output_tokens == 0
        assert self._flight is not None or not self._aborted_in_flight
        if self._flight is None:
            for request in running:
                assert -(-request.num_computed_tokens // size) * size == request.capacity
                assert request.num_computed_tokens < len(request.token_ids)
        self.kv.check_invariants([*running, *self._aborted_in_flight])
