"""One step on any device: rows, inputs, forward pass, sampling, result.

Owns the order of effects within a step::

    execute(plan)   drop rows -> add rows -> append blocks -> copy blocks -> forward (KV is written) -> progress
    sample(...)     a token for every row whose tokens are all computed -> append it to the row

Logits are stored for the rows that the sampler reads; of the others only the best token may be known.

Must not decide what is computed (the core does) nor how (a :class:`Backend` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.core.messages import NewRow, SchedulerOutput, StepResult, TokenLogprobs
from pagemill.memory_plan import MAX_PROMPT_LOGITS
from pagemill.sampling.constraints import Constraints
from pagemill.sampling.picker import joined
from pagemill.sampling.sampler import Sampled, Sampler
from pagemill.sampling.table import RowRequest
from pagemill.worker.backend import Backend, Computed
from pagemill.worker.input_batch import InputBatch

__all__ = ["Forward", "ModelRunner"]

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Forward:
    """A forward pass, between ``execute`` and ``sample``."""

    rows: Rows  # [R] the plan's rows
    sampled: list[Rows] = field(default_factory=list)
    """Which of them get a token, in the order of the logits; in parts."""
    computed: list[Computed] = field(default_factory=list)  # of [sampled rows, V], in the same parts
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    non_finite: set[str] = field(default_factory=set)
    """Requests that already failed on a prompt position."""


class ModelRunner:
    """Steps over the requests of one worker."""

    def __init__(self, backend: Backend, batch: InputBatch, sampler: Sampler) -> None:
        self.backend = backend
        self.batch = batch
        self.sampler = sampler
        self._prompt_logprobs: dict[int, int] = {}
        """Row -> candidates wanted for each prompt token."""

    def execute(self, plan: SchedulerOutput) -> Forward:
        """Bring the rows up to date and run the forward pass."""
        self._update_rows(plan)
        rows = self.batch.rows(plan)
        forward = Forward(rows)
        counts = np.array(plan.num_new_tokens, np.int64)
        if self._prompt_logprobs:
            self._execute_in_parts(plan, forward, counts)
        elif len(rows):
            self._forward_part(plan.request_ids, forward, np.arange(len(rows)), counts, more=False)
        return forward

    def sample(self, plan: SchedulerOutput, constraints: Constraints | None, forward: Forward) -> StepResult:
        """Tokens for the rows that are due, of those that ``constraints`` allow the plan's rows."""
        result = StepResult(
            token_ids=[], prompt_logprobs=forward.prompt_logprobs, non_finite=sorted(forward.non_finite)
        )
        if not forward.sampled:
            result.token_ids = [[] for _ in plan.request_ids]
            return result
        index, (logits, extremes) = forward.sampled[0], forward.computed[0]
        if len(forward.sampled) > 1:
            index, logits = np.concatenate(forward.sampled), torch.cat([part.rows for part in forward.computed])
            extremes = joined([part.extremes for part in forward.computed])
        rows = forward.rows[index]
        positions = self.batch.num_tokens[rows].astype(np.int64)
        allowed = None if constraints is None else constraints.of(index)
        sampled = self.sampler.sample(logits, rows, positions, allowed, extremes)
        failed = sampled.non_finite | sampled.nothing_allowed
        if (
            not result.non_finite
            and len(forward.sampled) == 1
            and len(index) == len(plan.request_ids)
            and not failed.any()
        ):
            self.batch.append_tokens(rows, sampled.token_ids)  # the usual step: one token for each request, in order
            result.token_ids = [[token] for token in sampled.token_ids.tolist()]
        else:
            result.nothing_allowed = [plan.request_ids[i] for i in index[sampled.nothing_allowed].tolist()]
            self._keep_good(plan, result, index, rows, sampled, failed)
        if sampled.logprobs is not None:
            result.logprobs = [None] * len(plan.request_ids)
            for i, entry in zip(index.tolist(), sampled.logprobs, strict=True):
                result.logprobs[i] = [entry] if entry is not None and result.token_ids[i] else None
        return result

    def _keep_good(
        self,
        plan: SchedulerOutput,
        result: StepResult,
        index: Rows,
        rows: Rows,
        sampled: Sampled,
        failed: NDArray[np.bool_],
    ) -> None:
        """Accept the tokens of the requests ``index`` of the plan, but for those that ``failed``, now or before."""
        result.token_ids = [[] for _ in plan.request_ids]
        failed_before = set(result.non_finite)
        self.batch.append_tokens(rows[~failed], sampled.token_ids[~failed])
        for i, token, bad in zip(index.tolist(), sampled.token_ids.tolist(), failed.tolist(), strict=True):
            if not bad and plan.request_ids[i] not in failed_before:
                result.token_ids[i].append(token)
        named = [plan.request_ids[i] for i in index[sampled.non_finite].tolist()]
        result.non_finite += [request_id for request_id in named if request_id not in failed_before]

    def warm_up(self) -> None:
        """Compute one token of nobody's."""
        self.backend.forward(self.batch.probe(self.backend.device))

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in self.batch.leave(plan):
            self.sampler.remove(row)
            self._prompt_logprobs.pop(row, None)
        for new in plan.new_rows:
            self._add(new)
        self.batch.grow(plan)
        if plan.block_copies:
            self.backend.copy_blocks(plan.block_copies)

    def _add(self, new: NewRow) -> None:
        row = self.batch.add(new)
        if new.params.prompt_logprobs is not None:
            self._prompt_logprobs[row] = new.params.prompt_logprobs
        request = RowRequest(
            params=new.params,
            seed=new.seed,
            token_ids=self.batch.token_ids[row, : len(new.token_ids)],
            num_prompt_tokens=new.num_prompt_tokens,
            eos_token_ids=new.eos_token_ids,
            bad_words=tuple(tuple(word) for word in new.bad_words_token_ids),
        )
        self.sampler.add(row, request)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _execute_in_parts(self, plan: SchedulerOutput, forward: Forward, counts: Rows) -> None:
        """Several forward passes, where some prompts want more log probabilities than memory for logits is planned."""
        remaining = counts
        while remaining.any():
            part = remaining.copy()
            room = MAX_PROMPT_LOGITS
            for i, row in enumerate(forward.rows.tolist()):
                if row in self._prompt_logprobs:
                    part[i] = min(part[i], room)
                    room -= part[i]
            remaining = remaining - part
            index = np.flatnonzero(part)
            self._forward_part(plan.request_ids, forward, index, part[index], more=bool(remaining.any()))

    def _forward_part(self, names: list[str], forward: Forward, index: Rows, counts: Rows, *, more: bool) -> None:
        """Run the requests ``index`` of the plan over ``counts`` tokens each; ``more``: another part follows."""
        batch, rows = self.batch, forward.rows[index]
        ends = batch.ends(rows, counts)
        last_token = counts.cumsum() - 1
        due, logits_rows = index, last_token
        if not ends.all():
            due, logits_rows = index[ends], last_token[ends]
        prompt_rows = self._prompt_positions(rows, counts)
        kept = self.sampler.reads(forward.rows[due])
        if prompt_rows:
            logits_rows = np.concatenate([logits_rows, *(tokens for _, tokens in prompt_rows)])
            kept = np.concatenate([kept, np.ones(len(logits_rows) - len(due), np.bool_)])
        logits, extremes = self.backend.forward(batch.build(rows, counts, logits_rows, self.backend.device, kept))
        start = len(due)
        for i, tokens in prompt_rows:
            self._report_prompt(names[index[i]], rows[i], logits[start : start + len(tokens)], forward)
            start += len(tokens)
        batch.advance(rows, counts)
        if len(due):
            forward.sampled.append(due)
            mine = logits[: len(due)]
            extremes = None if extremes is None else extremes.first(len(due))
            forward.computed.append(Computed(mine.clone(), extremes) if more else Computed(mine, extremes))

    def _prompt_positions(self, rows: Rows, counts: Rows) -> list[tuple[int, Rows]]:
        """(index in rows, step tokens whose logits foretell the next prompt token) where prompt_logprobs is asked."""
        if not self._prompt_logprobs:
            return []
        found = []
        ends = np.cumsum(counts)
        for i, row in enumerate(rows.tolist()):
            if row in self._prompt_logprobs:
                computed = int(self.batch.num_computed_tokens[row])
                most = int(self.batch.num_prompt_tokens[row]) - 1 - computed
                if most > 0:
                    first = int(ends[i] - counts[i])
                    found.append((i, np.arange(first, first + min(int(counts[i]), most))))
        return found

    def _report_prompt(self, request_id: str, row: int, logits: torch.Tensor, forward: Forward) -> None:
        """Log probabilities of the prompt tokens that follow those just computed."""
        if not bool(torch.isfinite(logits).all()):
            forward.non_finite.add(request_id)
            return
        first = int(self.batch.num_computed_tokens[row]) + 1
        following = self.batch.token_ids[row, first : first + len(logits)].astype(np.int64)
        entries = self.sampler.logprobs(logits, following, self._prompt_logprobs[row])
        forward.prompt_logprobs.setdefault(request_id, []).extend(entries)
