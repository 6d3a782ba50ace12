"""Chooses the next token of every row.

Order: non-finite rows are set aside; raw log probabilities are kept where asked for; grammars and processors change the
logits; greedy rows take the best token (lowest id among equals), the others draw from what temperature, min_p, top_k
and top_p leave (in that order), with noise keyed by (seed, position); processed log probabilities are of what was drawn
from.

Every operation is exact, or works within one row in an order that the row alone decides: a row's token and log
probabilities have the same bits whoever is sampled beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.params import LOGPROBS_MODES
from pagemill.sampling.constraints import Constraints
from pagemill.sampling.logprobs import TokenLogprobs, token_logprobs
from pagemill.sampling.picker import Extremes, Picker, TorchPicker, filtered
from pagemill.sampling.processors import LogitsProcessor, default_processors
from pagemill.sampling.table import RowRequest, SamplingTable

__all__ = ["Sampled", "Sampler"]

Rows = NDArray[np.int64]


@dataclass(slots=True)
class Sampled:
    """What one step's rows got."""

    token_ids: Rows  # [R]; meaningless where non_finite or nothing_allowed
    non_finite: NDArray[np.bool_]  # [R] the model's fault
    nothing_allowed: NDArray[np.bool_]  # [R] every token is forbidden by what the request asked for
    logprobs: list[TokenLogprobs | None] | None
    """None where no row asked."""


@dataclass(slots=True)
class _Bound:
    """Rows of logits with a mask each, int32 [n, ceil(V / 32)]."""

    greedy: Rows
    """All that is wanted of their logits is the best allowed one."""
    greedy_mask: NDArray[np.int32]
    written: Rows
    """Their logits are changed, for a draw, a processor or a report."""
    written_mask: NDArray[np.int32]


_NO_ROWS, _NO_MASK = np.empty(0, np.int64), np.empty((0, 0), np.int32)
_UNBOUND = _Bound(_NO_ROWS, _NO_MASK, _NO_ROWS, _NO_MASK)


class Sampler:
    """Sampling for the rows of one worker."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        picker: Picker | None = None,
        processors: Sequence[LogitsProcessor] | None = None,
        *,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        """``logprobs_mode``: of requests that name none, and of prompts."""
        self.table = SamplingTable(max_rows, logprobs_mode)
        self._prompts_as_logits = _as_logits(LOGPROBS_MODES.index(logprobs_mode))
        self._picker: Picker = picker or TorchPicker()
        self._processors = tuple(default_processors(vocab_size) if processors is None else processors)
        self._processed = np.zeros(max_rows, np.bool_)

    def add(self, row: int, request: RowRequest) -> None:
        """A request takes a row."""
        self.table.set(row, request)
        for processor in self._processors:
            processor.add(row, request)
        self._processed[row] = any(processor.wants(row) for processor in self._processors)

    def remove(self, row: int) -> None:
        """A request leaves its row."""
        if self._processed[row]:
            for processor in self._processors:
                processor.remove(row)
            self._processed[row] = False

    def reads(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows want more of their logits than the best. The others' need not be there when they are sampled."""
        table = self.table
        wanted: NDArray[np.bool_] = (
            ~table.greedy[rows] | (table.num_logprobs[rows] >= 0) | table.constrained[rows] | self._processed[rows]
        )
        return wanted

    def sample(
        self,
        logits: torch.Tensor,
        rows: Rows,
        positions: Rows,
        constraints: Constraints | None = None,
        extremes: Extremes | None = None,
    ) -> Sampled:
        """One token for each row of logits float32 [R, V], which are overwritten.

        ``rows`` [R]: permanent rows; ``positions`` [R]: index in its sequence of the token to draw; ``constraints``:
        what grammars allow the R rows; ``extremes``: of the logits, if known, overwritten too.
        """
        asked = np.flatnonzero(self.table.num_logprobs[rows] >= 0)
        drawn = np.flatnonzero(~self.table.greedy[rows])
        tokens, _, finite = self._picker.best(logits) if extremes is None else extremes
        non_finite, nothing_allowed = ~finite, np.zeros(len(rows), np.bool_)
        if non_finite.any():
            logits[torch.from_numpy(non_finite).to(logits.device)] = 0.0
        processed = _processed(self.table.logprobs_mode[rows[asked]])
        plain, late = asked[~processed], asked[processed]
        bound = self._bound(constraints, rows, late, tokens)
        raw = self._raw(logits, rows, plain, len(bound.written) > 0 and len(plain) > 0)
        changed = self._change(logits, rows, bound)
        if len(changed):
            among = logits if len(changed) == len(rows) else logits[torch.from_numpy(changed).to(logits.device)]
            tokens[changed], highest, _ = self._picker.best(among)
            nothing = changed[np.isneginf(highest)]
            if len(nothing):
                nothing_allowed[nothing] = True
                logits[torch.from_numpy(nothing).to(logits.device)] = 0.0
        if len(bound.greedy):
            tokens[bound.greedy], highest = self._picker.best_allowed(logits, bound.greedy, bound.greedy_mask)
            nothing_allowed[bound.greedy] = np.isneginf(highest)
        if len(drawn):
            tokens[drawn] = self._picker.draw(logits, drawn, self.table, rows[drawn], positions[drawn])
        nothing_allowed &= ~non_finite
        self._accept(rows, tokens, non_finite | nothing_allowed)
        if not len(asked):
            return Sampled(tokens, non_finite, nothing_allowed, None)
        found: list[TokenLogprobs | None] = [None] * len(rows)
        self._report(found, raw, plain, plain, rows, tokens)
        if len(late):
            self._report(found, self._as_drawn(logits, late, rows, tokens), np.arange(len(late)), late, rows, tokens)
        return Sampled(tokens, non_finite, nothing_allowed, found)

    def logprobs(self, logits: torch.Tensor, token_ids: Rows, num_candidates: int) -> list[TokenLogprobs]:
        """Log probabilities of given tokens [n], each in its row of logits [n, V]."""
        wanted = np.full(len(token_ids), num_candidates, np.int32)
        as_logits = np.full(len(token_ids), self._prompts_as_logits)
        return token_logprobs(self._picker, logits, np.arange(len(token_ids)), token_ids, wanted, as_logits)

    def _raw(self, logits: torch.Tensor, rows: Rows, asked: Rows, masked: bool) -> torch.Tensor:
        """Logits as they are now, for the rows that report them: a copy only where something will change them."""
        return logits.clone() if masked or self._processed[rows[asked]].any() else logits

    def _bound(self, constraints: Constraints | None, rows: Rows, late: Rows, tokens: Rows) -> _Bound:
        """The rows whose token a grammar decides; ``tokens`` [R]: the best of all.

        A greedy row that nothing else changes takes the best of all where that is allowed, and needs no mask.
        """
        if constraints is None:
            return _UNBOUND
        constrained = constraints.rows()
        simple = self.table.greedy[rows] & ~self._processed[rows]
        simple[late] = False
        greedy, written = constrained[simple[constrained]], constrained[~simple[constrained]]
        if len(greedy):
            greedy = greedy[~constraints.allow(greedy, tokens[greedy])]
        if not len(greedy) and not len(written):
            return _UNBOUND
        mask = constraints.bitmask(np.concatenate([greedy, written]))
        return _Bound(greedy, mask[: len(greedy)], written, mask[len(greedy) :])

    def _change(self, logits: torch.Tensor, rows: Rows, bound: _Bound) -> Rows:
        """Which rows' logits are others now."""
        if len(bound.written):
            self._picker.forbid(logits, bound.written, bound.written_mask)
        processed = np.flatnonzero(self._processed[rows])
        if len(processed):
            for processor in self._processors:
                processor.apply(logits, rows)
        return np.union1d(processed, bound.written) if len(bound.written) else processed

    def _accept(self, rows: Rows, tokens: Rows, failed: NDArray[np.bool_]) -> None:
        taken = np.flatnonzero(self._processed[rows] & ~failed)
        if len(taken):
            for processor in self._processors:
                processor.accept(rows[taken], tokens[taken])

    def _as_drawn(self, logits: torch.Tensor, late: Rows, rows: Rows, tokens: Rows) -> torch.Tensor:
        """Logits [n, V] of the rows ``late`` [n] after processors, temperature and filters (none, if greedy)."""
        reported = logits[torch.from_numpy(late).to(logits.device)]
        drawn = np.flatnonzero(~self.table.greedy[rows[late]])
        if len(drawn):
            where = torch.from_numpy(drawn).to(logits.device)
            chosen = torch.from_numpy(tokens[late[drawn]]).to(logits.device)[:, None]
            scaled = filtered(reported[where], self.table, rows[late[drawn]])
            temperature = torch.from_numpy(self.table.temperature[rows[late[drawn]]]).to(logits.device)[:, None]
            own = reported[where].gather(1, chosen) / temperature  # kept, however a filter's last bit was rounded
            reported[where] = scaled.scatter(1, chosen, own)
        return reported

    def _report(
        self,
        found: list[TokenLogprobs | None],
        logits: torch.Tensor,
        index: Rows,
        asked: Rows,
        rows: Rows,
        tokens: Rows,
    ) -> None:
        """Fill in what the rows ``asked`` [n] want to know, from the rows ``index`` [n] of logits."""
        table = self.table
        as_logits = _as_logits(table.logprobs_mode[rows[asked]])
        entries = token_logprobs(self._picker, logits, index, tokens[asked], table.num_logprobs[rows[asked]], as_logits)
        for at, (i, entry) in enumerate(zip(asked.tolist(), entries, strict=True)):
            listed = table.logprob_token_ids[rows[i]]
            if listed:
                ids = np.array(listed, np.int64)
                again, none = np.full(len(ids), index[at]), np.zeros(len(ids), np.int32)
                given = token_logprobs(self._picker, logits, again, ids, none, np.full(len(ids), as_logits[at]))
                entry += [each[0] for each in given]
            found[i] = entry


def _processed(mode: NDArray[np.int8]) -> NDArray[np.bool_]:
    return mode >= LOGPROBS_MODES.index("processed_logprobs")


def _as_logits(mode: Any) -> Any:
    """Whether a mode, or which of several, reports logits."""
    return mode % 2 == 1
