"""Chooses the next token of every row.

Order: non-finite rows are set aside; raw log probabilities are kept where asked for; the grammars' mask and the
processors change the logits; greedy rows take the best token (lowest id among equals), the others draw from what
temperature, min_p, top_k and top_p leave (in that order), with noise keyed by (seed, position).

Every operation is exact, or works within one row in an order that the row alone decides: a row's token and log
probabilities have the same bits whoever is sampled beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.sampling.logprobs import TokenLogprobs, ordered_topk, token_logprobs
from pagemill.sampling.noise import uniforms
from pagemill.sampling.processors import LogitsProcessor, apply_bitmask, default_processors
from pagemill.sampling.table import RowRequest, SamplingTable

__all__ = ["Sampled", "Sampler"]

Rows = NDArray[np.int64]
_FIRST_TOP_P = 256
"""Candidates sorted first for top_p; eight times as many while they do not hold enough mass."""


@dataclass(slots=True)
class Sampled:
    """What one step's rows got."""

    token_ids: Rows  # [R]; meaningless where non_finite
    non_finite: NDArray[np.bool_]  # [R]
    logprobs: list[TokenLogprobs | None] | None
    """None where no row asked."""


class Sampler:
    """Sampling for the rows of one worker."""

    def __init__(self, max_rows: int, vocab_size: int, processors: Sequence[LogitsProcessor] | None = None) -> None:
        self.table = SamplingTable(max_rows)
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

    def sample(
        self, logits: torch.Tensor, rows: Rows, positions: Rows, mask: NDArray[np.int32] | None = None
    ) -> Sampled:
        """One token for each row of logits float32 [R, V], which are overwritten.

        ``rows`` [R]: permanent rows; ``positions`` [R]: index in its sequence of the token to draw; ``mask`` int32
        [R, ceil(V / 32)]: allowed tokens by bit, lowest first.
        """
        tokens, lowest, highest = _extremes(logits)
        non_finite = ~(np.isfinite(lowest) & np.isfinite(highest))
        if non_finite.any():
            logits[torch.from_numpy(non_finite).to(logits.device)] = 0.0
        asked = np.flatnonzero(self.table.num_logprobs[rows] >= 0)
        raw = logits[torch.from_numpy(asked).to(logits.device)] if len(asked) else None
        if self._change(logits, rows, mask):
            tokens, _, highest = _extremes(logits)
            nothing = np.isneginf(highest)  # every token is forbidden
            if nothing.any():
                non_finite |= nothing
                logits[torch.from_numpy(nothing).to(logits.device)] = 0.0
        drawn = np.flatnonzero(~self.table.greedy[rows])
        if len(drawn):
            tokens[drawn] = self._draw(logits, drawn, rows[drawn], positions[drawn])
        self._accept(rows, tokens, non_finite)
        return Sampled(tokens, non_finite, self._logprobs(raw, asked, rows, tokens))

    def _change(self, logits: torch.Tensor, rows: Rows, mask: NDArray[np.int32] | None) -> bool:
        if mask is not None:
            apply_bitmask(logits, mask)
        processed = bool(self._processed[rows].any())
        if processed:
            for processor in self._processors:
                processor.apply(logits, rows)
        return processed or mask is not None

    def _accept(self, rows: Rows, tokens: Rows, non_finite: NDArray[np.bool_]) -> None:
        taken = np.flatnonzero(self._processed[rows] & ~non_finite)
        if len(taken):
            for processor in self._processors:
                processor.accept(rows[taken], tokens[taken])

    def _draw(self, logits: torch.Tensor, index: Rows, rows: Rows, positions: Rows) -> Rows:
        """Tokens for the rows ``index`` of logits, drawn from what the filters leave."""
        table, device = self.table, logits.device

        def column(values: NDArray[np.float32] | NDArray[np.int32]) -> torch.Tensor:
            return torch.from_numpy(values[rows]).to(device)[:, None]

        scaled = logits if len(index) == len(logits) else logits[torch.from_numpy(index).to(device)]
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / column(table.temperature)
        weights = torch.exp(scaled)  # the best token's is 1
        if (table.min_p[rows] > 0).any():
            weights = weights.masked_fill(weights < column(table.min_p), 0.0)
        for picked, top_k in _chosen(table.top_k[rows], (table.top_k[rows] > 0)):
            where = torch.from_numpy(picked).to(device)
            weights[where] = _keep_top_k(weights[where], torch.from_numpy(top_k).to(device))
        for picked, top_p in _chosen(table.top_p[rows], table.top_p[rows] < 1):
            where = torch.from_numpy(picked).to(device)
            weights[where] = _keep_top_p(weights[where], torch.from_numpy(top_p).to(device).double())
        mass = torch.cumsum(weights.double(), dim=-1)
        noise = torch.from_numpy(uniforms(table.seed[rows], positions)).to(device)[:, None]
        tokens = torch.searchsorted(mass, noise * mass[:, -1:], right=True)[:, 0]
        last = weights.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
        return np.asarray(torch.minimum(tokens, last).cpu().numpy())

    def _logprobs(
        self, raw: torch.Tensor | None, asked: Rows, rows: Rows, tokens: Rows
    ) -> list[TokenLogprobs | None] | None:
        if raw is None:
            return None
        found: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = token_logprobs(raw, tokens[asked], self.table.num_logprobs[rows[asked]])
        for i, entry in zip(asked.tolist(), wanted, strict=True):
            found[i] = entry
        return found


def _extremes(logits: torch.Tensor) -> tuple[Rows, NDArray[np.float32], NDArray[np.float32]]:
    """Of each row of logits [R, V]: the first of the best tokens, the lowest and the highest logit (NaN if any is)."""
    if logits.device.type == "cpu":  # numpy's are several times faster than torch's there
        values: NDArray[np.float32] = logits.numpy()
        best = values.argmax(axis=1)
        return best, values.min(axis=1, initial=np.inf), np.take_along_axis(values, best[:, None], 1)[:, 0]
    lowest, highest = torch.aminmax(logits, dim=-1)
    return logits.argmax(dim=-1).cpu().numpy(), lowest.cpu().numpy(), highest.cpu().numpy()


def _chosen(values: NDArray[np.generic], where: NDArray[np.bool_]) -> list[tuple[Rows, NDArray[np.generic]]]:
    """The rows that use a filter and its values there; empty where none does."""
    picked = np.flatnonzero(where)
    return [(picked, values[picked])] if len(picked) else []


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Weights [R, V] with all but the top_k [R] heaviest at 0; among equals the lowest ids stay."""
    most = min(int(top_k.max()), weights.shape[1])
    best, ids = ordered_topk(weights, most, unordered=0.0)
    best = best.masked_fill(torch.arange(most, device=best.device) >= top_k[:, None], 0.0)
    return torch.zeros_like(weights).scatter_(1, ids, best)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Weights [R, V] with all at 0 but the heaviest whose preceding mass is below top_p [R] (float64) of the whole."""
    limit = top_p * torch.cumsum(weights.double(), dim=-1)[:, -1]
    kept = torch.zeros_like(weights)
    todo = torch.arange(len(weights), device=weights.device)
    size = min(_FIRST_TOP_P, weights.shape[1])
    while len(todo):
        part = weights[todo]
        best, ids = ordered_topk(part, size, unordered=0.0)
        mass = torch.cumsum(best.double(), dim=-1)
        before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
        best = best.masked_fill(before >= limit[todo, None], 0.0)
        kept[todo] = torch.zeros_like(part).scatter_(1, ids, best)
        if size == weights.shape[1]:
            break
        todo = todo[mass[:, -1] < limit[todo]]
        size = min(8 * size, weights.shape[1])
    return kept
