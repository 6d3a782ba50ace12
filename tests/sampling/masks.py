"""Constraints by a mask that is there already."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass
class Masked:
    mask: NDArray[np.int32]  # [rows, ceil(V / 32)]
    written: list[int] = field(default_factory=list)
    """Rows whose mask was asked for."""

    def of(self, index: Rows) -> Masked:
        return Masked(self.mask[index], self.written)

    def rows(self) -> Rows:
        return np.flatnonzero((self.mask != -1).any(axis=1))

    def allow(self, at: Rows, tokens: Rows) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self.mask[at, tokens // 32] >> (tokens % 32)) & 1 != 0
        return found

    def bitmask(self, at: Rows) -> NDArray[np.int32]:
        self.written += at.tolist()
        return self.mask[at]
