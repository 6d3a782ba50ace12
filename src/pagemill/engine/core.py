"""The engine's heart: one step after another, as design.md draws it.

Owns the order of effects in a step: take in what the front sent, schedule, begin the masks, forward pass, sample what
the grammars allow, accept tokens, send what was produced. Where the executor is asynchronous, sending waits for the
next forward pass and hides under it. Must not know sockets, text or devices: messages come from ``inbox``, outputs go
to ``sink``, tensors stay behind the executor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineOutput, EngineRequest, SchedulerOutput, StepResult
from pagemill.core.scheduler import Scheduler
from pagemill.engine.grammars import TokenGrammars
from pagemill.engine.wire import Abort, Add, Call, CallReply, StepOutputs, StepStats, Stop, ToEngine, reported
from pagemill.errors import PagemillError, RequestError
from pagemill.params import FinishReason

__all__ = ["EngineCore", "Grammars", "NoGrammars", "StepExecutor"]


TAKEN_IN_A_STEP = 65536
"""Prompt tokens: those who decode wait for their hashes, some 8 ms."""
TOKENS_OF_A_COPY = 16
"""Of a prompt that was taken in just before; it costs as much as one token that was not."""


class StepExecutor(Protocol):
    """The part of an executor that a step needs."""

    asynchronous: bool
    """Whether ``execute`` returns before the forward pass is done."""

    def execute(self, plan: SchedulerOutput) -> Any:
        """Start (or do) the forward pass; returns a handle."""

    def sample(self, plan: SchedulerOutput, constraints: Any, handle: Any) -> StepResult:
        """Wait for the forward pass and sample."""

    def call(self, name: str, *args: Any) -> Any:
        """An admin operation on the worker."""

    def shutdown(self) -> None:
        """Free what the worker holds."""


class Grammars(Protocol):
    """Constrains what may be sampled."""

    def ready(self, request: EngineRequest) -> bool:
        """Whether a constrained request can start; if not yet, its grammar is being built. RequestError: never."""

    def wait(self) -> None:
        """Until a grammar may be built, or a few milliseconds."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Start on the masks of a plan whose forward pass comes next."""

    def constraints(self) -> Any:
        """What the plan's rows may take, or None where nothing is constrained."""

    def accept(self, outputs: list[EngineOutput]) -> None:
        """Take in the tokens that were accepted."""


class NoGrammars:
    """Everything may be sampled."""

    def ready(self, request: EngineRequest) -> bool:
        """Constrained requests are refused."""
        raise RequestError("this engine has no structured outputs", param="structured_outputs")

    def wait(self) -> None:
        """Nothing is ever built."""

    def begin(self, plan: SchedulerOutput) -> None:
        """No row is constrained."""

    def constraints(self) -> None:
        """No row is constrained."""

    def accept(self, outputs: list[EngineOutput]) -> None:
        """No row is constrained."""


class EngineCore:
    """Scheduler and executor, driven one step at a time by whoever owns the thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        inbox: Callable[[], Iterable[ToEngine]],
        sink: Callable[[StepOutputs | CallReply], None],
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stopping = False
        """Set by :class:`~pagemill.engine.wire.Stop`; the loop around the steps ends."""
        self._inbox = inbox
        self._sink = sink
        self._clock = clock
        self._grammars: Grammars = grammars or NoGrammars()
        self._pending: StepOutputs | None = None
        self._refused: list[EngineOutput] = []
        self._arriving: dict[str, EngineRequest] = {}
        """Requests that were received and are not queued yet, oldest first: a step takes in only so many tokens."""
        self._held: dict[str, EngineRequest] = {}
        """Requests whose grammar is being built."""
        self._stale = False
        """The queues changed since figures were last sent, and no step tells of it."""
        self._last_step = 0

    @classmethod
    def create(
        cls,
        config: EngineConfig,
        executor: Any,
        *,
        inbox: Callable[[], Iterable[ToEngine]],
        sink: Callable[[StepOutputs | CallReply], None],
    ) -> EngineCore:
        """The core for an executor whose model is loaded."""
        causal = executor.model_config.causal
        scheduler = Scheduler(
            executor.kv_specs,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=executor.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold if causal else 0,
            max_stall_s=config.max_stall_ms / 1000 if causal else 0.0,
            policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching and causal,
            whole_prompts=not causal,
        )
        grammars = TokenGrammars(
            config, executor.model_config, num_cpus=executor.num_cpus, num_free_cpus=executor.num_free_cpus
        )
        return cls(scheduler, executor, inbox=inbox, sink=sink, grammars=grammars)

    def step(self) -> bool:
        """One step; False when there was nothing to compute (and everything produced has been sent)."""
        for message in self._inbox():
            self._handle(message)
        if self._held:
            self._release()
        if self._arriving:
            self._take_in()
        start_s = self._clock()
        plan = self.scheduler.schedule(start_s)
        if plan is None:
            self.flush()
            if not self._held:
                return bool(self._arriving)
            self._grammars.wait()
            return True
        self._grammars.begin(plan)
        forward = self.executor.execute(plan)
        self.flush()
        result = self.executor.sample(plan, self._grammars.constraints(), forward)
        done_s = self._clock()
        outputs = self.scheduler.update(plan, result, done_s)
        self._grammars.accept(outputs)
        self._last_step = plan.step
        stats = self._stats(start_s, done_s, plan.total_num_tokens)
        scheduled = [row.request_id for row in plan.new_rows]
        self._pending = StepOutputs(outputs, stats, scheduled, plan.preempted_request_ids)
        if not self.executor.asynchronous:
            self.flush()
        return True

    def flush(self) -> None:
        """Send what the last step produced, and what was refused since."""
        pending, refused = self._pending, self._refused
        if pending is None:
            if not refused and not self._stale:
                return
            now_s = self._clock()
            pending = StepOutputs([], self._stats(now_s, now_s, 0))
        if refused:
            pending.outputs.extend(refused)
            self._refused = []
        self._pending, self._stale = None, False
        self._sink(pending)

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._receive(message.requests)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                early = self._arriving.pop(request_id, None) or self._held.pop(request_id, None)
                self._stale |= early is not None or self.scheduler.abort(request_id)
        elif isinstance(message, Call):
            self._sink(self._call(message))
        else:
            assert isinstance(message, Stop)
            self.stopping = True

    def _receive(self, requests: list[EngineRequest]) -> None:
        """Let requests wait for their turn to be taken in, each with its prompt."""
        prompt: list[int] = []
        for request in requests:
            prompt = request.prompt_token_ids = request.prompt_token_ids or prompt
            if request.request_id in self._arriving:  # the name is in use, which the second is told
                self._add(self._arriving.pop(request.request_id))
            self._arriving[request.request_id] = request

    def _take_in(self) -> None:
        """Queue what has arrived, at most so much that a step is not held up."""
        left, prompt = TAKEN_IN_A_STEP, None
        num_held = len(self._held)
        while self._arriving and left > 0:
            request = self._arriving.pop(next(iter(self._arriving)))
            num_tokens = len(request.prompt_token_ids)
            left -= num_tokens if request.prompt_token_ids is not prompt else 1 + num_tokens // TOKENS_OF_A_COPY
            prompt = request.prompt_token_ids
            self._add(request)
        self._stale |= len(self._held) != num_held

    def _add(self, request: EngineRequest) -> None:
        """Queue a request, or hold it while its grammar is built."""
        try:
            if request.params.structured_outputs is not None and not self._grammars.ready(request):
                self._held[request.request_id] = request
            else:
                self.scheduler.add(request)
        except PagemillError as error:
            self._refused.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=str(error),
                    error_status=error.status,
                    error_param=error.param if isinstance(error, RequestError) else None,
                )
            )

    def _release(self) -> None:
        """Ask again for every request that is held, in order of arrival."""
        held, self._held = self._held, {}
        for request in held.values():
            self._add(request)

    def _call(self, message: Call) -> CallReply:
        """An admin operation: one of the core's own, else the executor's."""
        try:
            if message.name == "stats":
                now_s = self._clock()
                return CallReply(message.call_id, self._stats(now_s, now_s, 0))
            if message.name == "block_states":
                return CallReply(message.call_id, self.scheduler.kv.block_states())
            if message.name == "check_invariants":
                self.scheduler.check_invariants()
                return CallReply(message.call_id)
            return CallReply(message.call_id, self.executor.call(message.name, *message.args))
        except (PagemillError, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            return CallReply(message.call_id, error=reported(error))

    def _stats(self, start_s: float, done_s: float, num_tokens: int) -> StepStats:
        now = self.scheduler.stats()
        return StepStats(
            self._last_step,
            done_s,
            start_s,
            num_tokens,
            now.num_running,
            now.num_waiting + len(self._held) + len(self._arriving),
            now.kv_cache_usage,
            now.prefix_query_tokens_total,
            now.prefix_hit_tokens_total,
            now.num_preemptions_total,
            now.allocated_slots,
            now.filled_slots,
            len(self._held),
        )
