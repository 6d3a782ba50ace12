"""Int8 weights with one scale per output, multiplied with activations rounded to int8 with one scale per token.

Owns the rounding (scale = absmax / 127, to nearest even) and the two weights of this kind: PyTorch's and the native
kernels'. What is folded into a matrix beforehand is models/int8.py's.
"""

from __future__ import annotations

import torch

from pagemill.quant.method import LinearShape

__all__ = ["Int8Weight", "round_rows"]

LEVELS = 127.0
CHUNK_WEIGHTS = 4 << 20
"""Weights widened at a time."""


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as int8 and its scale: [N, K] -> int8 [N, K], float32 [N]."""
    x = x.float()
    largest = torch.linalg.vector_norm(x, float("inf"), dim=-1)
    inverse = torch.where(largest > 0, LEVELS / largest, 0.0)
    return (x * inverse[:, None]).round_().to(torch.int8), largest / LEVELS


class Int8Weight:
    """A matrix [out_features, in_features] as int8, in PyTorch's own functions."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self.out_features, self.in_features = shape.out_features, shape.in_features
        self.q = torch.empty(shape.out_features, shape.in_features, dtype=torch.int8, device=device)
        self.scale = torch.empty(shape.out_features, device=device)
        self.bias: torch.Tensor | None = None
        self.dtype = dtype  # of activations

    @property
    def nbytes(self) -> int:
        """Bytes of integers, scales and bias."""
        return self.q.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def write(self, row: int, q: torch.Tensor, scale: torch.Tensor) -> None:
        """Rows from ``row`` on: int8 [n, in_features], float32 [n]."""
        self.q[row : row + len(q)] = q
        self.scale[row : row + len(q)] = scale

    def pack_bias(self, bias: torch.Tensor) -> None:
        """Keep the bias beside the integers."""
        self.bias = bias.to(self.q.device)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias in x's type, x rounded to int8 row by row."""
        rounded, scale = round_rows(x)
        wide = rounded.float()
        step = max(1, CHUNK_WEIGHTS // self.in_features)
        product = torch.cat([wide @ part.float().T for part in torch.split(self.q, step)], dim=-1)
        out = product * self.scale * scale[:, None]
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows in the type of activations: [N] -> [N, in_features]."""
        ids = ids.long()
        return (self.q[ids].float() * self.scale[ids, None]).to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32."""
        return self.q.float() * self.scale[:, None]
