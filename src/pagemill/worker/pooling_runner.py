"""Steps of a model that pools: rows, inputs, forward pass, and a vector for each sequence that is wholly computed.

Owns the pooling, row by row, so that a sequence's bytes depend on it alone. A mean is summed up token by token in
float64 over as many steps as the prompt takes; the sum of a request that loses its row is dropped with it. Must not
decide what is computed (the core does), nor scale vectors (the front does).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagemill.core.messages import NewRow, SchedulerOutput, StepResult
from pagemill.kernels.ops import StepInputs
from pagemill.model_config import ModelConfig
from pagemill.sampling.constraints import Constraints
from pagemill.worker.backend import Backend
from pagemill.worker.input_batch import InputBatch

__all__ = ["Pooled", "PoolingRunner"]

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Pooled:
    """A forward pass, between ``execute`` and ``sample``."""

    vectors: dict[str, bytes] = field(default_factory=dict)
    non_finite: list[str] = field(default_factory=list)


class PoolingRunner:
    """Steps over the requests of one worker."""

    def __init__(self, backend: Backend, batch: InputBatch, config: ModelConfig) -> None:
        assert config.pooling is not None
        self.backend = backend
        self.batch = batch
        self._config = config
        self._kind = config.pooling.kind
        self._sums: dict[int, NDArray[np.float64]] = {}
        """Row -> sum of the hidden states so far [1, H]."""
        self._second_segments: dict[int, int] = {}
        """Row -> first token of its second segment."""
        self._firsts: dict[int, NDArray[np.float32]] = {}
        """Row -> hidden state of its first token."""

    def execute(self, plan: SchedulerOutput) -> Pooled:
        """Bring the rows up to date, run the forward pass, pool."""
        self._update_rows(plan)
        pooled = Pooled()
        rows = self.batch.rows(plan)
        if not len(rows):
            return pooled
        counts = np.array(plan.num_new_tokens, np.int64)
        ends = self.batch.ends(rows, counts)
        wanted, tokens = self._wanted(rows, counts, ends)
        inputs = self.batch.build(rows, counts, tokens, self.backend.device)
        if self._second_segments:
            self._mark_segments(rows, inputs)
        hidden = self.backend.forward(inputs).rows.numpy(force=True)
        self.batch.advance(rows, counts)
        start = 0
        for i, count in wanted:
            vector = self._take(int(rows[i]), hidden[start : start + count], bool(ends[i]))
            start += count
            if vector is None:
                continue
            if np.isfinite(vector).all():
                pooled.vectors[plan.request_ids[i]] = vector.astype("<f4").tobytes()
            else:
                pooled.non_finite.append(plan.request_ids[i])
        return pooled

    def sample(self, plan: SchedulerOutput, constraints: Constraints | None, forward: Pooled) -> StepResult:
        """What ``execute`` found; nothing is sampled."""
        return StepResult(
            token_ids=[[] for _ in plan.request_ids], pooled=forward.vectors, non_finite=forward.non_finite
        )

    def warm_up(self) -> None:
        """Compute one token of nobody's."""
        self.backend.forward(self.batch.probe(self.backend.device))

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in self.batch.leave(plan):
            for kept in (self._sums, self._second_segments, self._firsts):
                kept.pop(row, None)
        for new in plan.new_rows:
            self._add(new)
        self.batch.grow(plan)

    def _add(self, new: NewRow) -> None:
        row = self.batch.add(new)
        if new.second_segment is not None:
            self._second_segments[row] = new.second_segment

    # ---- pooling ----------------------------------------------------------------------------------------------------

    def _wanted(self, rows: Rows, counts: Rows, ends: NDArray[np.bool_]) -> tuple[list[tuple[int, int]], Rows]:
        """(index in the plan, number of hidden states) of each row that takes some, and those tokens of the step."""
        stops = counts.cumsum()
        if self._kind == "mean":
            return list(enumerate(counts.tolist())), np.arange(stops[-1])
        if self._kind == "last":
            index = np.flatnonzero(ends)
            return [(i, 1) for i in index.tolist()], stops[index] - 1
        # cls: the first token may have been computed some steps before the last one
        first = self.batch.num_computed_tokens[rows] == 0
        taking = np.flatnonzero(first | ends)
        starts = (stops - counts)[first]
        return [(i, int(first[i])) for i in taking.tolist()], starts

    def _take(self, row: int, hidden: NDArray[np.float32], ends: bool) -> NDArray[np.floating] | None:
        """The row's vector, once it is complete. ``hidden`` [tokens taken, H]."""
        if self._kind == "last":
            return np.asarray(hidden[0])
        if self._kind == "cls":
            if len(hidden):
                self._firsts[row] = hidden[0].copy()
            return self._firsts[row] if ends else None
        before = self._sums.get(row)
        parts = hidden.astype(np.float64) if before is None else np.concatenate((before, hidden.astype(np.float64)))
        total: NDArray[np.float64] = np.add.reduce(parts, axis=0, keepdims=True)  # row after row, whatever the chunks
        self._sums[row] = total
        if not ends:
            return None
        return np.asarray(total[0] / self.batch.num_tokens[row])

    def _mark_segments(self, rows: Rows, inputs: StepInputs) -> None:
        """Second segments look up the second part of the position table."""
        starts = inputs.query_start.tolist()
        for i, row in enumerate(rows.tolist()):
            second = self._second_segments.get(row)
            if second is not None:
                inputs.positions[starts[i] + second : starts[i + 1]] += self._config.max_position_embeddings
