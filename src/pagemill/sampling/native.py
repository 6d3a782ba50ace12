"""The native picker: one pass over each row, rows shared out over the kernels' threads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill import _native
from pagemill.sampling.picker import RowLogprobs
from pagemill.sampling.table import SamplingTable

__all__ = ["NativePicker"]

Rows = NDArray[np.int64]


class NativePicker:
    """:class:`~pagemill.sampling.picker.Picker` on a CPU."""

    name = "native"

    def best(self, logits: torch.Tensor) -> tuple[Rows, NDArray[np.float32], NDArray[np.bool_]]:
        """Best token, its logit and finiteness in one pass."""
        rows = len(logits)
        best, highest, finite = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.bool_)
        _native.row_extremes(logits, best, highest, finite)
        return best, highest, finite

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
