"""A matrix of a checkpoint on its way into a packed weight.

Owns which rows and columns of which stored tensor a layer takes (experts, head permutations, shards). Reads a few
megabytes at a time, so that never more than one small piece is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagemill.models.checkpoint import StoredTensor, Unpacked
from pagemill.models.gguf_blocks import BLOCK_FORMATS

__all__ = ["Matrix"]

CHUNK_BYTES = 8 << 20
"""Converted bytes in flight."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Matrix:
    """Rows of a stored tensor of shape [N, K], or of one expert of [E, N, K]."""

    stored: StoredTensor
    expert: int | None = None
    order: npt.NDArray[np.int64] | None = None
    """Stored row of each row [N]; None keeps the file's order."""
    rows: slice = field(default_factory=lambda: slice(None))
    """Which of the (reordered) rows are taken."""
    columns: slice = field(default_factory=lambda: slice(None))
    """Which columns are taken; of block formats, whole blocks."""

    @property
    def shape(self) -> tuple[int, int]:
        """[rows taken, columns taken]."""
        height, width = self.stored.shape[-2:]
        return len(range(height)[self.rows]), len(range(width)[self.columns])

    @property
    def is_blocks(self) -> bool:
        """Whether the file holds quantised blocks."""
        return self.stored.type in BLOCK_FORMATS

    def chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces [n, columns taken] as ``dtype`` with the row each starts at, top to bottom."""
        height, width = self.shape
        if self.order is not None or self.expert is not None:
            yield 0, self._whole(dtype)
            return
        first = range(self.stored.shape[0])[self.rows].start
        step = max(1, CHUNK_BYTES // (self.stored.shape[1] * dtype.itemsize))
        for low in range(0, height, step):
            high = min(low + step, height)
            piece = self.stored.to_torch(dtype, rows=slice(first + low, first + high))
            yield low, piece[:, self.columns] if width != piece.shape[1] else piece

    def _whole(self, dtype: torch.dtype) -> torch.Tensor:
        if self.expert is None:
            full = self.stored.to_torch(dtype)
        else:
            full = self.stored.to_torch(dtype, rows=slice(self.expert, self.expert + 1))[0]
        if self.order is not None:
            return full[torch.from_numpy(self.order[self.rows]), self.columns]
        return full[self.rows, self.columns]

    def blocks(self) -> torch.Tensor:
        """The file's bytes, row by row: uint8 [rows taken, bytes of the columns taken], in memory of its own."""
        form = BLOCK_FORMATS[self.stored.type]
        height, width = self.stored.shape[-2:]
        stored = self.stored.data.reshape(-1, height, width // form.size * form.nbytes)[self.expert or 0]
        left, right, _ = self.columns.indices(width)
        assert left % form.size == 0 == right % form.size
        columns = slice(left // form.size * form.nbytes, right // form.size * form.nbytes)
        order = (np.arange(height) if self.order is None else self.order)[self.rows]
        out = np.empty((len(order), columns.stop - columns.start), np.uint8)
        step = max(1, CHUNK_BYTES // stored.shape[1])
        for low in range(0, len(out), step):
            out[low : low + step] = stored[order[low : low + step], columns]
            self.stored.release()
        return torch.from_numpy(out)

    def unpack(self) -> Unpacked:
        """The file's integers and scales for the rows and columns taken."""
        expert = None if self.expert is None else slice(self.expert, self.expert + 1)
        whole = self.stored.unpack(expert)
        height, width = self.stored.shape[-2:]
        index = self.rows if self.order is None else self.order[self.rows]
        left, right, _ = self.columns.indices(width)
        groups = slice(left // whole.group, right // whole.group)
        return Unpacked(
            whole.q.reshape(height, -1)[index, self.columns],
            whole.scale.reshape(height, -1)[index, groups],
            whole.minimum.reshape(height, -1)[index, groups],
            whole.bits,
            whole.group,
        )
