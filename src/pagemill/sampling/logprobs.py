"""Log probabilities as they are reported: the chosen token's, then the best ones' or given ones'.

Owns the form (ids, values, ranks), the ranks of equals, the value that stands for minus infinity, and the logits where
those are wanted instead. Which logits they are of (the model's, or what filters left) is the sampler's choice. The
numbers come from a picker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.sampling.picker import Picker, RowLogprobs

__all__ = ["MINUS_INFINITY", "TokenLogprobs", "token_logprobs"]

TokenLogprobs = list[tuple[int, float, int]]
MINUS_INFINITY = -9999.0
"""JSON has no infinity."""


def token_logprobs(
    picker: Picker,
    logits: torch.Tensor,
    index: NDArray[np.int64],
    chosen: NDArray[np.int64],
    num_candidates: NDArray[np.int32],
    as_logits: NDArray[np.bool_] | None = None,
) -> list[TokenLogprobs]:
    """For the rows ``index`` [n] of logits [R, V]: (id, log probability, rank) of ``chosen`` [n], then of the best.

    ``num_candidates`` [n] >= 0 says how many of those. Equal values share a rank. Where ``as_logits`` [n], logits take
    the log probabilities' place.
    """
    most = min(int(num_candidates.max(initial=0)), logits.shape[1])
    told = picker.logprobs(logits, index, chosen, most)
    if as_logits is not None and as_logits.any():
        told = _with_logits(told, logits, index, chosen, as_logits)
    found: list[TokenLogprobs] = [
        [entry] for entry in zip(chosen.tolist(), _clamped(told.value), told.rank.tolist(), strict=True)
    ]
    if most:
        # A best token's rank is its place, or that of the first of its equals.
        values = told.best_value
        first = np.concatenate([np.ones((len(values), 1), bool), values[:, 1:] != values[:, :-1]], axis=1)
        ranks = np.maximum.accumulate(np.where(first, np.arange(1, most + 1), 0), axis=1)
        rows = zip(told.best.tolist(), _clamped(values), ranks.tolist(), num_candidates.tolist(), strict=True)
        for entries, (ids, best, places, wanted) in zip(found, rows, strict=True):
            entries += list(zip(ids, best, places, strict=True))[:wanted]
    return found


def _with_logits(
    told: RowLogprobs,
    logits: torch.Tensor,
    index: NDArray[np.int64],
    chosen: NDArray[np.int64],
    as_logits: NDArray[np.bool_],
) -> RowLogprobs:
    ids = np.concatenate([chosen[:, None], told.best], axis=1)  # [n, 1 + most]
    rows = torch.from_numpy(index).to(logits.device)[:, None]
    values: NDArray[np.float32] = logits[rows, torch.from_numpy(ids).to(logits.device)].cpu().numpy()
    return told._replace(
        value=np.where(as_logits, values[:, 0], told.value),
        best_value=np.where(as_logits[:, None], values[:, 1:], told.best_value),
    )


def _clamped(values: NDArray[np.float32]) -> list[Any]:
    clamped: list[Any] = np.maximum(values, MINUS_INFINITY).tolist()
    return clamped
