"""Log probabilities to report: of the chosen token and of the best ones, before any filter.

Owns ranks, ties (lower id first) and the value that stands for minus infinity. Must not change the logits it is given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["MINUS_INFINITY", "TokenLogprobs", "ordered_topk", "token_logprobs"]

TokenLogprobs = list[tuple[int, float, int]]
MINUS_INFINITY = -9999.0
"""JSON has no infinity."""
_ROWS_AT_ONCE = 64


def token_logprobs(
    logits: torch.Tensor, chosen: NDArray[np.int64], num_candidates: NDArray[np.int32]
) -> list[TokenLogprobs]:
    """For each row of logits [R, V]: (id, log probability, rank) of the chosen token, then of the best ones.

    ``chosen`` [R]; ``num_candidates`` [R], >= 0. Computed a few rows at a time: a long prompt's would be large.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(logits), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        found += _token_logprobs(logits[part], chosen[part], num_candidates[part])
    return found


def _token_logprobs(
    logits: torch.Tensor, chosen: NDArray[np.int64], num_candidates: NDArray[np.int32]
) -> list[TokenLogprobs]:
    values = torch.log_softmax(logits.float(), dim=-1)
    own = values.gather(1, torch.from_numpy(chosen).to(values.device)[:, None])  # [R, 1]
    ranks = (values > own).sum(dim=1) + 1
    found: list[TokenLogprobs] = [
        [(token, value, rank)]
        for token, value, rank in zip(chosen.tolist(), _clamped(own[:, 0]), ranks.tolist(), strict=True)
    ]
    most = min(int(num_candidates.max(initial=0)), values.shape[1])
    if most:
        best, ids = ordered_topk(values, most)
        for row, (row_ids, row_best, wanted) in enumerate(
            zip(ids.tolist(), _clamped(best), num_candidates.tolist(), strict=True)
        ):
            found[row] += zip(row_ids[:wanted], row_best[:wanted], _ranks(row_best[:wanted]), strict=True)
    return found


def _clamped(values: torch.Tensor) -> Any:
    """As nested lists of floats, as deep as the tensor."""
    return values.clamp(min=MINUS_INFINITY).tolist()


def _ranks(descending: list[float]) -> list[int]:
    """1 for the best; equal values share the rank of the first of them."""
    ranks: list[int] = []
    for i, value in enumerate(descending):
        ranks.append(ranks[-1] if i and value == descending[i - 1] else i + 1)
    return ranks


def ordered_topk(values: torch.Tensor, k: int, unordered: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of values [R, V], descending, equal ones by ascending index: values and ids [R, k].

    Where the k-th is ``unordered``, any of those equal to it may be among the k.
    """
    best, ids = torch.topk(values, k, dim=-1)
    last = best[:, -1:]
    inside, everywhere = (best == last).sum(dim=1), (values == last).sum(dim=1)
    cut = (inside != everywhere) & (last[:, 0] != unordered)
    for row in torch.nonzero(cut)[:, 0].tolist():  # which of the equal ones topk took is chance: take the lowest
        ids[row, best[row] == last[row]] = torch.nonzero(values[row] == last[row])[: int(inside[row]), 0]
    ids = ids.sort(dim=-1).values
    best, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)
