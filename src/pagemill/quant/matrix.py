"""A matrix of a checkpoint on its way into a packed weight.

Owns which rows and columns of which stored tensor a layer takes (experts, head permutations, shards). Reads a small
piece at a time, so that never more than one is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pagemill.models.checkpoint import StoredTensor
from pagemill.models.gguf_blocks import BLOCK_FORMATS, Codes

__all__ = ["Matrix"]

CHUNK_BYTES = 512 << 10
"""Converted bytes in flight. Larger pieces make the allocator keep some: 2 MiB held 15 % of a 160 MB model on top."""


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
        out = torch.empty(self.shape[0], self.shape[1] // form.size * form.nbytes, dtype=torch.uint8)
        for at, piece in self._block_rows():
            out[at : at + len(piece)] = torch.from_numpy(piece)
        return out

    def codes(self) -> Iterator[tuple[int, Codes]]:
        """The file's integers and scales for a few rows at a time: q [n, K], scale and minimum [n, K / group]."""
        form = BLOCK_FORMATS[self.stored.type]
        for at, piece in self._block_rows():
            codes = form.unpack(piece.reshape(-1, form.nbytes))
            rows = len(piece)
            minimum = None if codes.minimum is None else codes.minimum.reshape(rows, -1)
            yield at, Codes(codes.q.reshape(rows, -1), codes.scale.reshape(rows, -1), minimum, codes.zero)

    def _block_rows(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """The bytes of a few rows at a time [n, bytes of the columns taken], with the row each piece starts at."""
        form = BLOCK_FORMATS[self.stored.type]
        height, width = self.stored.shape[-2:]
        stored = self.stored.data.reshape(-1, height, width // form.size * form.nbytes)[self.expert or 0]
        left, right, _ = self.columns.indices(width)
        assert left % form.size == 0 == right % form.size
        columns = slice(left // form.size * form.nbytes, right // form.size * form.nbytes)
        order = (np.arange(height) if self.order is None else self.order)[self.rows]
        step = max(1, CHUNK_BYTES // width)
        for low in range(0, len(order), step):
            yield low, stored[order[low : low + step], columns]
            self.stored.release()
