"""GGUF's quantised blocks, kept byte for byte and turned into numbers a few rows at a time, each time they are used.

Costs the file's own memory and no more; the fast way to multiply with them is the native kernels'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pagemill.models.gguf_blocks import BLOCK_FORMATS
from pagemill.quant.matrix import Matrix
from pagemill.quant.method import LinearShape, Target

__all__ = ["BlockMethod", "BlockWeight"]

CHUNK_WEIGHTS = 1 << 20
"""Weights turned into numbers at a time."""


@dataclass(slots=True, eq=False)
class _Segment:
    """Consecutive rows of one block format."""

    first: int
    type: str
    blocks: torch.Tensor  # uint8 [rows, bytes per row]

    def dequantize(self, blocks: torch.Tensor) -> torch.Tensor:
        """Some of the rows as float32 [n, in_features]."""
        form = BLOCK_FORMATS[self.type]
        return torch.from_numpy(form.dequantise(blocks.numpy().reshape(-1, form.nbytes))).view(len(blocks), -1)


class BlockWeight:
    """A matrix [out_features, in_features] in one or more block formats."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype  # of activations
        self.bias: torch.Tensor | None = None
        self._segments: list[_Segment] = []

    @property
    def nbytes(self) -> int:
        """Bytes of blocks and bias."""
        return sum(part.blocks.nbytes for part in self._segments) + (0 if self.bias is None else self.bias.nbytes)

    def pack(self, row: int, matrix: Matrix) -> None:
        """Keep the blocks of ``matrix``; parts come top to bottom."""
        assert row == sum(len(part.blocks) for part in self._segments)
        self._segments.append(_Segment(row, matrix.stored.type, matrix.blocks()))

    def pack_bias(self, bias: torch.Tensor) -> None:
        """Keep the bias beside the blocks."""
        self.bias = bias

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias in x's type."""
        out = x.new_empty(*x.shape[:-1], self.out_features)
        for first, weights in self._pieces():
            out[..., first : first + len(weights)] = x @ weights.to(x.dtype).T
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows in the type of activations: [N] -> [N, in_features]."""
        (segment,) = self._segments
        return segment.dequantize(segment.blocks[ids.long()]).to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32."""
        return torch.cat([weights for _, weights in self._pieces()])

    def _pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Float32 rows, a few at a time, with the number of the first."""
        step = max(1, CHUNK_WEIGHTS // self.in_features)
        for segment in self._segments:
            for low in range(0, len(segment.blocks), step):
                yield segment.first + low, segment.dequantize(segment.blocks[low : low + step])


class BlockMethod:
    """Keeps the file's integers."""

    def create(self, shape: LinearShape, matrices: Sequence[Matrix], target: Target) -> BlockWeight:
        """A matrix without rows yet."""
        return BlockWeight(shape.out_features, shape.in_features, target.dtype)
