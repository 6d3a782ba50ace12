"""What the sampler asks of grammars: whether a token is allowed, and which are.

The first question is cheap; the answer to the second has a bit for every token of the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Constraints"]

Rows = NDArray[np.int64]


class Constraints(Protocol):
    """What the rows of a step may take."""

    def of(self, index: Rows) -> Constraints:
        """The same for some rows: row i of the result is row ``index[i]`` of this."""

    def rows(self) -> Rows:
        """Which rows are constrained, ascending."""

    def allow(self, at: Rows, tokens: Rows) -> NDArray[np.bool_]:
        """[n] whether the constrained rows ``at`` [n] may take these tokens [n]; if not, the bitmask decides."""

    def bitmask(self, at: Rows) -> NDArray[np.int32]:
        """Tokens that the constrained rows ``at`` [n >= 1] may take, by bit, lowest first, int32 [n, ceil(V / 32)]."""
