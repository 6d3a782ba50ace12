"""Layer normalisation with a weight and a bias, as encoders have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.kernels.ops import Ops, Value

__all__ = ["LayerNorm"]


@dataclass(slots=True, eq=False, kw_only=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    weight: torch.Tensor  # float32 [H]
    bias: torch.Tensor  # float32 [H]
    eps: float

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    @property
    def nbytes(self) -> int:
        """Bytes of both vectors."""
        return self.weight.nbytes + self.bias.nbytes
