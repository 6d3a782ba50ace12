"""The orthogonal matrices that make activations easy to round.

A few channels of a residual stream are far larger than the rest, and one scale per token then leaves little of the
others. After an orthogonal matrix that mixes all channels they are alike, and the matrix folds into the weights around
it (Ashkboos et al., QuaRot; Liu et al., SpinQuant). Nothing here reads files or quantises.
"""

from __future__ import annotations

import math

import torch

from pagemill.kernels.reference import hadamard

__all__ = ["Rotation", "hadamard_block"]

SEED = 0x5EED
MAX_BLOCK = 1024
MAX_WHOLE = 1024
"""Up to this size one product with Q is quicker than those with its factors."""


def hadamard_block(size: int) -> int:
    """The largest power of two, up to 1024, that divides ``size``; 0 where there is none above 1."""
    block = min(size & -size, MAX_BLOCK)
    return block if block > 1 else 0


class Rotation:
    """An orthogonal matrix Q [size, size] that spreads any single channel over all: random signs, then Hadamard on the
    power of two in ``size`` and Hartley's transform on the odd rest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._power = size & -size
        odd = size // self._power
        angles = 2 * math.pi / odd * torch.outer(torch.arange(odd), torch.arange(odd)).double()
        self._hartley = ((angles.cos() + angles.sin()) / math.sqrt(odd)).float()  # symmetric, its own inverse
        generator = torch.Generator().manual_seed(SEED)
        self._signs = torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1
        self._whole = self._factored(torch.eye(size)) if size <= MAX_WHOLE else None

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """x Q: [..., size] -> [..., size], float32."""
        return self._factored(x) if self._whole is None else x.float() @ self._whole

    def _factored(self, x: torch.Tensor) -> torch.Tensor:
        y = hadamard((x.float() * self._signs).reshape(-1, self._power), self._power)
        across = y.view(-1, self.size // self._power, self._power).transpose(1, 2)
        return (across @ self._hartley).transpose(1, 2).reshape(x.shape)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Q^T x: [size, n] -> [size, n], float32."""
        return self.columns(x.T).T
