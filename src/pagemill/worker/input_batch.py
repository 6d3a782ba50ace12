"""The worker's memory of its requests: one permanent row each, in arrays that a step only indexes.

Owns tokens, progress and block tables of every request that has a row. A request's tokens and blocks arrive once; a
step costs work in proportion to what changed, and its tensors are cut from the rows by whole-array operations.
Must not decide anything: the core says who computes how many tokens with which blocks.

The arrays are int32 and contiguous, so that native code can read them in place::

    row r:  token_ids[r]      p0 p1 p2 ... t0 t1 _ _ _      num_prompt_tokens[r], num_tokens[r]
                              |------|                      num_computed_tokens[r]
            block_tables[g][r]  17 4 9 _ _                  per group of layers
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.core.messages import NewRow, SchedulerOutput
from pagemill.kernels.ops import StepInputs

__all__ = ["InputBatch"]

Ints = NDArray[np.int32]


class InputBatch:
    """Rows for up to ``max_rows`` requests of up to ``max_model_len`` tokens."""

    def __init__(self, *, max_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        width = max_model_len + 1  # a full context may still get the token that ends it
        self.token_ids: Ints = np.zeros((max_rows, width), np.int32)
        self.num_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_prompt_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_computed_tokens: Ints = np.zeros(max_rows, np.int32)
        self.num_blocks: Ints = np.zeros((num_groups, max_rows), np.int32)
        blocks = -(-width // block_size)
        self.block_tables: list[Ints] = [np.zeros((max_rows, blocks), np.int32) for _ in range(num_groups)]
        self._row_of: dict[str, int] = {}
        self._free = list(range(max_rows - 1, -1, -1))
        self._last_ids: list[str] | None = None
        self._last_rows = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._row_of)

    def row_of(self, request_id: str) -> int:
        """The request's row, for as long as it has one."""
        return self._row_of[request_id]

    def add(self, new: NewRow) -> int:
        """Give a request a row and fill it."""
        row = self._free.pop()
        self._row_of[new.request_id] = row
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_blocks[:, row] = 0
        self.append_blocks(row, new.block_ids)
        self._last_ids = None
        return row

    def remove(self, request_id: str) -> int | None:
        """Take a request's row away; None where it has none."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._last_ids = None
        return row

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Add blocks at the end of the row's table in each group."""
        for group, ids in enumerate(block_ids):
            start = self.num_blocks[group, row]
            self.block_tables[group][row, start : start + len(ids)] = ids
            self.num_blocks[group, row] = start + len(ids)

    def leave(self, plan: SchedulerOutput) -> list[int]:
        """Take away the rows of what finished or was preempted; which rows those were."""
        left = [self.remove(request_id) for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids)]
        return [row for row in left if row is not None]

    def grow(self, plan: SchedulerOutput) -> None:
        """Add the blocks that the plan gives to requests which have a row."""
        for request_id, blocks in zip(plan.request_ids, plan.new_block_ids, strict=True):
            if blocks is not None:
                self.append_blocks(self.row_of(request_id), blocks)

    def rows(self, plan: SchedulerOutput) -> NDArray[np.int64]:
        """The plan's rows [R], in its order; looked up anew only when the requests changed."""
        if plan.request_ids != self._last_ids:
            self._last_rows = np.array([self._row_of[name] for name in plan.request_ids], np.int64)
            self._last_ids = plan.request_ids
        return self._last_rows

    def ends(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows have all their tokens computed after so many more: they get a new token. [R]."""
        done: NDArray[np.bool_] = self.num_computed_tokens[rows] + counts == self.num_tokens[rows]
        return done

    def build(
        self,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        logits_rows: NDArray[np.int64],
        device: torch.device,
        logits_kept: NDArray[np.bool_] | None = None,
    ) -> StepInputs:
        """The tensors of a step in which row ``rows[i]`` computes ``counts[i]`` >= 1 tokens.

        ``logits_rows`` [L]: which of the step's tokens need logits; ``logits_kept`` as in :class:`StepInputs`.
        """
        computed = self.num_computed_tokens[rows].astype(np.int64)
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        row_of_token, positions = rows, computed  # [N]
        if starts[-1] > len(rows):
            row_of_token = np.repeat(rows, counts)
            positions = np.arange(starts[-1]) + np.repeat(computed - starts[:-1], counts)
        context = computed + counts  # [R]
        block, offset = np.divmod(positions, self.block_size)
        most_blocks = -(-int(context.max()) // self.block_size)

        def tensor(values: NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)

        return StepInputs(
            token_ids=tensor(self.token_ids[row_of_token, positions]),
            positions=tensor(positions),
            query_start=tensor(starts),
            context_lens=tensor(context),
            slot_mapping=[tensor(table[row_of_token, block] * self.block_size + offset) for table in self.block_tables],
            block_tables=[tensor(table[rows, :most_blocks]) for table in self.block_tables],
            logits_rows=tensor(logits_rows),
            logits_kept=None if logits_kept is None else torch.from_numpy(logits_kept),
        )

    def probe(self, device: torch.device) -> StepInputs:
        """One token in block 0, whose contents nobody has claimed yet, so that first calls pay nothing."""
        tables = [np.zeros((1, 1), np.int32) for _ in self.block_tables]
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        return StepInputs(
            token_ids=zero,
            positions=zero,
            query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
            context_lens=zero + 1,
            slot_mapping=[zero for _ in tables],
            block_tables=[torch.from_numpy(table).to(device) for table in tables],
            logits_rows=zero,
        )

    def advance(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """These rows have computed so many more tokens."""
        self.num_computed_tokens[rows] += counts.astype(np.int32)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One new token for each of these rows, [R] and [R]."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
