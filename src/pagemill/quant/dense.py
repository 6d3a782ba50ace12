"""Weights as plain numbers in a torch tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pagemill.quant.matrix import Matrix
from pagemill.quant.method import LinearShape, Target

__all__ = ["DenseMethod", "DenseWeight"]

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WIDENED_ROWS_BYTES = 16 << 20
"""Rows converted at a time where activations are wider than the weights."""


class DenseWeight:
    """A matrix [out_features, in_features] of any float type."""

    def __init__(
        self, matrix: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.matrix = matrix
        self.bias = bias
        self.out_features, self.in_features = matrix.shape
        self.dtype = dtype or matrix.dtype  # of activations

    @property
    def nbytes(self) -> int:
        """Bytes of matrix and bias."""
        return self.matrix.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def pack(self, row: int, matrix: Matrix) -> None:
        """Convert ``matrix`` into the rows from ``row`` on."""
        for at, piece in matrix.chunks(self.matrix.dtype):
            self.matrix[row + at : row + at + len(piece)].copy_(piece)

    def pack_bias(self, bias: torch.Tensor) -> None:
        """Keep the bias beside the matrix."""
        self.bias = bias.to(self.matrix.device)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias, computed and returned in x's type."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if x.dtype == self.matrix.dtype:
            return F.linear(x, self.matrix, bias)
        step = max(1, WIDENED_ROWS_BYTES // (self.in_features * x.element_size()))
        out = torch.cat([x @ part.to(x.dtype).T for part in torch.split(self.matrix, step)], dim=-1)
        return out if bias is None else out + bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows in the type of activations: [N] -> [N, in_features]."""
        return self.matrix[ids.long()].to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32."""
        return self.matrix.float()


class DenseMethod:
    """Keeps the file's float type, or the one the user named."""

    def create(self, shape: LinearShape, matrices: Sequence[Matrix], target: Target) -> DenseWeight:
        """An empty matrix of the type that loses nothing."""
        types = {STORED.get(matrix.stored.type, target.dtype) for matrix in matrices}
        stored = types.pop() if len(types) == 1 else target.dtype
        dtype = target.dtype if target.explicit else stored
        room = torch.empty(shape.out_features, shape.in_features, dtype=dtype, device=target.device)
        return DenseWeight(room, dtype=target.dtype)
