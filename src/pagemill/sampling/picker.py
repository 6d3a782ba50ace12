"""Masks, the best token of each row, and seeded draws from what the filters leave, in PyTorch's functions.

Owns the meaning of temperature, min_p, top_k and top_p (in that order; see noise.py for the draw itself). The native
picker (native.py) does the same in one pass over each row. Neither may let rows touch each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.sampling.noise import uniforms
from pagemill.sampling.table import SamplingTable

__all__ = ["Extremes", "Picker", "RowLogprobs", "TorchPicker", "filtered", "joined"]

Rows = NDArray[np.int64]
_FIRST_TOP_P = 256
"""Candidates sorted first for top_p; eight times as many while they do not hold enough mass."""


class Extremes(NamedTuple):
    """What is asked first of rows of logits [R, V]."""

    best: Rows  # [R] the lowest id of the highest logit
    highest: NDArray[np.float32]  # [R] that logit
    finite: NDArray[np.bool_]  # [R] whether all of the row are

    def first(self, count: int) -> Extremes:
        """Of the first rows."""
        return Extremes(self.best[:count], self.highest[:count], self.finite[:count])


def joined(parts: Sequence[Extremes | None]) -> Extremes | None:
    """Of the rows of all parts, in order; None where one does not know."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Extremes(*(np.concatenate(columns) for columns in zip(*known, strict=True)))


class RowLogprobs(NamedTuple):
    """Log probabilities in n rows: of one token each, and of the best, equals by ascending id."""

    value: NDArray[np.float32]  # [n]
    rank: Rows  # [n] 1: the best; equals share the rank of the first
    best: Rows  # [n, most]
    best_value: NDArray[np.float32]  # [n, most] descending


class Picker(Protocol):
    """Finds tokens in rows of logits."""

    name: str

    def best(self, logits: torch.Tensor) -> Extremes:
        """Of each row of logits float32 [R, V]."""

    def best_allowed(
        self, logits: torch.Tensor, index: Rows, mask: NDArray[np.int32]
    ) -> tuple[Rows, NDArray[np.float32]]:
        """Of the rows ``index`` [n] of logits, as :meth:`best`, among the tokens whose bit in ``mask`` is 1.

        ``mask`` as in :meth:`forbid`. Where no token is allowed the logit is -inf.
        """

    def logprobs(self, logits: torch.Tensor, index: Rows, chosen: Rows, most: int) -> RowLogprobs:
        """Of the tokens ``chosen`` [n] in the rows ``index`` [n] of logits [R, V], and of the ``most`` <= V best."""

    def forbid(self, logits: torch.Tensor, index: Rows, mask: NDArray[np.int32]) -> None:
        """logits [index, V] = -inf in place where the token's bit in mask [n, ceil(V / 32)], lowest first, is 0."""

    def draw(self, logits: torch.Tensor, index: Rows, table: SamplingTable, rows: Rows, positions: Rows) -> Rows:
        """Tokens [n] for the rows ``index`` [n] of logits, whose parameters are in the permanent rows ``rows`` [n].

        ``positions`` [n]: index in its sequence of each token to draw. No row is -inf throughout.
        """


class TorchPicker:
    """The reference."""

    name = "torch"

    def best(self, logits: torch.Tensor) -> Extremes:
        """numpy's argmax on a CPU (several times faster than torch's there), torch's elsewhere."""
        if logits.device.type == "cpu":
            values: NDArray[np.float32] = logits.numpy()
            best, lowest = values.argmax(axis=1), values.min(axis=1)
            highest = np.take_along_axis(values, best[:, None], 1)[:, 0]
        else:
            low, high = torch.aminmax(logits, dim=-1)
            best, lowest, highest = (part.cpu().numpy() for part in (logits.argmax(dim=-1), low, high))
        return Extremes(best, highest, np.isfinite(lowest) & np.isfinite(highest))

    def best_allowed(
        self, logits: torch.Tensor, index: Rows, mask: NDArray[np.int32]
    ) -> tuple[Rows, NDArray[np.float32]]:
        """From a copy of the rows."""
        allowed = logits[torch.from_numpy(index).to(logits.device)]
        self.forbid(allowed, np.arange(len(index)), mask)
        best, highest, _ = self.best(allowed)
        return best, highest

    def logprobs(self, logits: torch.Tensor, index: Rows, chosen: Rows, most: int) -> RowLogprobs:
        """A few rows at a time: their softmax is as large as they are."""
        parts = [
            self._logprobs(logits[torch.from_numpy(index[at : at + 64]).to(logits.device)], chosen[at : at + 64], most)
            for at in range(0, len(index), 64)
        ]
        return RowLogprobs(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @staticmethod
    def _logprobs(logits: torch.Tensor, chosen: Rows, most: int) -> RowLogprobs:
        values = torch.log_softmax(logits, dim=-1)
        own = values.gather(1, torch.from_numpy(chosen).to(values.device)[:, None])  # [n, 1]
        rank = (values > own).sum(dim=1) + 1
        best, ids = _ordered_topk(values, most)
        return RowLogprobs(*(part.cpu().numpy() for part in (own[:, 0], rank, ids, best)))

    def forbid(self, logits: torch.Tensor, index: Rows, mask: NDArray[np.int32]) -> None:
        """Bits to booleans, then one masked fill."""
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=1, bitorder="little")
        allowed = torch.from_numpy(bits[:, : logits.shape[1]]).to(logits.device, torch.bool)
        where = torch.from_numpy(index).to(logits.device)
        logits[where] = logits[where].masked_fill(~allowed, -torch.inf)

    def draw(self, logits: torch.Tensor, index: Rows, table: SamplingTable, rows: Rows, positions: Rows) -> Rows:
        """Whole columns at a time."""
        device = logits.device
        weights = _kept(
            logits if len(index) == len(logits) else logits[torch.from_numpy(index).to(device)], table, rows
        )
        mass = torch.cumsum(weights.double(), dim=-1)
        noise = torch.from_numpy(uniforms(table.seed[rows], positions)).to(device)[:, None]
        tokens = torch.searchsorted(mass, noise * mass[:, -1:], right=True)[:, 0]
        last = weights.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
        return np.asarray(torch.minimum(tokens, last).cpu().numpy())


def filtered(logits: torch.Tensor, table: SamplingTable, rows: Rows) -> torch.Tensor:
    """Logits [n, V] as a draw for ``rows`` [n] sees them: over the temperature, -inf where a filter leaves nothing."""
    temperature = torch.from_numpy(table.temperature[rows]).to(logits.device)[:, None]
    return (logits / temperature).masked_fill(_kept(logits, table, rows) <= 0, -torch.inf)


def _kept(logits: torch.Tensor, table: SamplingTable, rows: Rows) -> torch.Tensor:
    """Weights [n, V] of the tokens that the filters of ``rows`` [n] leave, the best token's 1; 0 for the others."""
    device = logits.device

    def column(values: NDArray[np.float32] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device)[:, None]

    weights = torch.exp((logits - logits.amax(dim=-1, keepdim=True)) / column(table.temperature))
    if (table.min_p[rows] > 0).any():
        weights = weights.masked_fill(weights < column(table.min_p), 0.0)
    for picked, top_k in _chosen(table.top_k[rows], (table.top_k[rows] > 0)):
        where = torch.from_numpy(picked).to(device)
        weights[where] = _keep_top_k(weights[where], torch.from_numpy(top_k).to(device))
    for picked, top_p in _chosen(table.top_p[rows], table.top_p[rows] < 1):
        where = torch.from_numpy(picked).to(device)
        weights[where] = _keep_top_p(weights[where], torch.from_numpy(top_p).to(device).double())
    return weights


def _chosen(values: NDArray[np.generic], where: NDArray[np.bool_]) -> list[tuple[Rows, NDArray[np.generic]]]:
    """The rows that use a filter and its values there; empty where none does."""
    picked = np.flatnonzero(where)
    return [(picked, values[picked])] if len(picked) else []


def _keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Weights [R, V] with all but the top_k [R] heaviest at 0; among equals the lowest ids stay."""
    most = min(int(top_k.max()), weights.shape[1])
    best, ids = _ordered_topk(weights, most, unordered=0.0)
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
        best, ids = _ordered_topk(part, size, unordered=0.0)
        mass = torch.cumsum(best.double(), dim=-1)
        before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
        best = best.masked_fill(before >= limit[todo, None], 0.0)
        kept[todo] = torch.zeros_like(part).scatter_(1, ids, best)
        if size == weights.shape[1]:
            break
        todo = todo[mass[:, -1] < limit[todo]]
        size = min(8 * size, weights.shape[1])
    return kept


def _ordered_topk(values: torch.Tensor, k: int, unordered: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of values [R, V], descending, equal ones by ascending index: values and ids [R, k].

    Where the k-th is ``unordered``, any of those equal to it may be among the k.
    """
    best, ids = torch.topk(values, k, dim=-1)
    if not k:
        return best, ids
    last = best[:, -1:]
    inside, everywhere = (best == last).sum(dim=1), (values == last).sum(dim=1)
    cut = (inside != everywhere) & (last[:, 0] != unordered)
    for row in torch.nonzero(cut)[:, 0].tolist():  # which of the equal ones topk took is chance: take the lowest
        ids[row, best[row] == last[row]] = torch.nonzero(values[row] == last[row])[: int(inside[row]), 0]
    ids = ids.sort(dim=-1).values
    best, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)
