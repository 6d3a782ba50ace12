"""A worker without a model: it keeps to the messages' contract and checks that its paged memory holds what it should.

Every KV slot stores a digest of all tokens up to its own. Before a token is computed, every slot that its query would
see is compared with the row's own tokens, so a wrong block, a stale hit or a missing copy shows at once. The next token
is a function of those digests and of the position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from hypothesis import HealthCheck, settings

from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import EngineOutput, EngineRequest, NewRow, SchedulerOutput, StepResult
from pagemill.core.scheduler import Scheduler
from pagemill.params import FinishReason, SamplingParams

VOCAB = 50


def full(num_blocks: int, block_size: int = 4) -> KVCacheSpec:
    return KVCacheSpec(kind="full", layers=(0,), block_size=block_size, bytes_per_block=1, num_blocks=num_blocks)


def window(num_blocks: int, size: int, block_size: int = 4) -> KVCacheSpec:
    return KVCacheSpec(
        kind="window", layers=(1,), block_size=block_size, window=size, bytes_per_block=1, num_blocks=num_blocks
    )


def digest(parent: bytes, token: int) -> bytes:
    return blake2b(parent + token.to_bytes(8, "little"), digest_size=8).digest()


class Row:
    """What the worker keeps about a request; ``digests[p]`` covers tokens 0..p."""

    def __init__(self, new: NewRow) -> None:
        self.new = new
        self.token_ids: list[int] = []
        self.digests: list[bytes] = []
        self.block_ids = [list(table) for table in new.block_ids]
        self.num_computed = new.num_computed_tokens
        for token in new.token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self.digests.append(digest(self.digests[-1] if self.digests else b"", token))


class FakeWorker:
    """Executes plans. ``memory[group][block_id]`` is a block's slots."""

    def __init__(self, specs: Sequence[KVCacheSpec]) -> None:
        self.specs = specs
        self.memory = [[[b""] * spec.block_size for _ in range(spec.num_blocks)] for spec in specs]
        self.rows: dict[str, Row] = {}
        self.poisoned: set[str] = set()
        self.stuck: set[str] = set()
        """Requests whose parameters forbid every token."""
        self.num_computed_tokens = 0
        self.computed_by: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> StepResult:
        for request_id in plan.finished_request_ids + plan.preempted_request_ids:
            del self.rows[request_id]
        for new in plan.new_rows:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = Row(new)
        for copy in plan.block_copies:
            blocks = self.memory[copy.group]
            blocks[copy.target] = list(blocks[copy.source])
        result = StepResult(token_ids=[])
        assert len(set(plan.request_ids)) == len(plan.request_ids)
        assert sum(plan.num_new_tokens) == plan.total_num_tokens
        for request_id, count, added in zip(plan.request_ids, plan.num_new_tokens, plan.new_block_ids, strict=True):
            row = self.rows[request_id]
            for table, ids in zip(row.block_ids, added or [], strict=added is not None):
                table += ids
            result.token_ids.append(self._compute(row, count, result))
        return result

    def _compute(self, row: Row, count: int, result: StepResult) -> list[int]:
        assert count >= 1
        start, end = row.num_computed, row.num_computed + count
        assert end <= len(row.token_ids)
        for position in range(start, end):
            for group, spec in enumerate(self.specs):
                self._write(row, group, spec, position)
        row.num_computed = end
        self.num_computed_tokens += count
        self.computed_by[row.new.request_id] = self.computed_by.get(row.new.request_id, 0) + count
        if row.new.params.prompt_logprobs is not None and start < row.new.num_prompt_tokens - 1:
            result.prompt_logprobs[row.new.request_id] = [
                [(row.token_ids[p + 1], -float(p), 1)] for p in range(start, min(end, row.new.num_prompt_tokens - 1))
            ]
        if end < len(row.token_ids):
            return []
        if row.new.request_id in self.poisoned:
            result.non_finite.append(row.new.request_id)
            return []
        if row.new.params.max_tokens == 0:
            return []
        if row.new.request_id in self.stuck:
            result.nothing_allowed.append(row.new.request_id)
            return []
        token = self.next_token(row)
        row.append(token)
        return [token]

    def _write(self, row: Row, group: int, spec: KVCacheSpec, position: int) -> None:
        table, memory, size = row.block_ids[group], self.memory[group], spec.block_size
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        for seen in range(first, position):
            assert memory[table[seen // size]][seen % size] == row.digests[seen], (
                f"{row.new.request_id}: group {group} does not hold position {seen} seen from {position}"
            )
        assert table[position // size] >= 0
        memory[table[position // size]][position % size] = row.digests[position]

    def next_token(self, row: Row) -> int:
        drawn = int.from_bytes(row.digests[-1], "little") ^ row.new.seed
        token = drawn % VOCAB
        done = len(row.token_ids) - row.new.num_prompt_tokens
        params = row.new.params
        if done < params.min_tokens:
            while token in params.stop_token_ids + row.new.eos_token_ids:
                token = (token + 1) % VOCAB
        return token


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    eos: tuple[int, ...] = (),
    priority: int = 0,
    salt: str | None = None,
    tenant: str = "",
    seed: int = 0,
    **params: object,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams.create(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        arrival_time_s=0.0,
        eos_token_ids=eos,
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        seed=seed,
    )


class Engine:
    """A scheduler and a fake worker in lock step; collects what each request gets."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        **options: object,
    ) -> None:
        self.worker = FakeWorker(specs)
        self.scheduler = Scheduler(
            specs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            **options,  # type: ignore[arg-type]
        )
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.plans: list[SchedulerOutput] = []

    def add(self, *messages: EngineRequest) -> None:
        for message in messages:
            self.scheduler.add(message)
            self.tokens[message.request_id] = []
            self.outputs[message.request_id] = []

    def step(
        self,
        between: Callable[[], object] = lambda: None,
        *,
        now_s: float | None = None,
        seconds: Callable[[SchedulerOutput], float] = lambda _: 1.0,
    ) -> SchedulerOutput | None:
        """One step, at ``now_s`` or a second after the last one began; ``between`` runs while the worker computes."""
        now_s = float(len(self.plans)) if now_s is None else now_s
        plan = self.scheduler.schedule(now_s)
        if plan is None:
            return None
        self.plans.append(plan)
        assert plan.total_num_tokens <= self.scheduler.max_num_batched_tokens
        self.scheduler.check_invariants()
        result = self.worker.execute(plan)
        between()
        for output in self.scheduler.update(plan, result, now_s + seconds(plan)):
            assert output.request_id not in self.reasons, "output after the end"
            self.outputs[output.request_id].append(output)
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self.scheduler.check_invariants()
        return plan

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if self.step() is None:
                break
        assert not self.scheduler.has_work, f"still busy after {limit} steps"
        assert self.scheduler.kv.num_used_blocks == 0
        self.scheduler.check_invariants()


def state_machine_settings(num_steps: int) -> settings:
    """So many steps in all, in runs of 50; no deadline, since machines that run tests are busy."""
    return settings(
        max_examples=num_steps // 50,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
