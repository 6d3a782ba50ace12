"""The native picker: one pass over each row, rows shared out over the kernels' threads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill import _native
from pagemill.sampling.picker import Extremes, RowLogprobs
from pagemill.sampling.table import SamplingTable

__all__ = ["NativePicker", "empty_extremes"]

Rows = NDArray[np.int64]


def empty_extremes(rows: int) -> Extremes:
    """To be filled in by a native call."""
    return Extremes(np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.bool_))


class NativePicker:
    """:class:`~pagemill.sampling.picker.Picker` on a CPU."""

    name = "native"

    def best(self, logits: torch.Tensor) -> Extremes:
        """In one pass."""
        found = empty_extremes(len(logits))
        _native.row_extremes(logits, *found)
        return found

    def best_allowed(
        self, logits: torch.Tensor, index: Rows, mask: NDArray[np.int32]
    ) -> tuple[Rows, NDArray[np.float32]]:
        """Nothing is copied or written."""
        best, highest = np.empty(len(index), np.int64), np.empty(len(index), np.float32)
        _native.best_allowed(logits, index, np.ascontiguousarray(mask), best, highest)
        return best, highest

    def logprobs(self, logits: torch.Tensor, index: Rows, chosen: Rows, most: int) -> RowLogprobs:
        """The softmax's sum in one pass; only tokens near the best are sorted."""
        told = RowLogprobs(
            np.empty(len(index), np.float32),
            np.empty(len(index), np.int64),
            np.empty((len(index), most), np.int64),
            np.empty((len(index), most), np.float32),
        )
        _native.row_logprobs(logits, index, chosen, *told)
        return told

    def forbid(self, logits: torch.Tensor, index: Rows, mask: NDArray[np.int32]) -> None:
        """Rows without a forbidden token are only read."""
        _native.forbid_tokens(logits, index, np.ascontiguousarray(mask))

    def draw(self, logits: torch.Tensor, index: Rows, table: SamplingTable, rows: Rows, positions: Rows) -> Rows:
        """Sorts only the candidates that the filters can keep."""
        tokens = np.empty(len(index), np.int64)
        _native.draw_rows(
            logits,
            index,
            table.temperature[rows],
            table.top_k[rows],
            table.top_p[rows],
            table.min_p[rows],
            table.seed[rows],
            positions,
            tokens,
        )
        return tokens
