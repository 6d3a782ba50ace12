"""Weights packed for the native kernels, which walk them in the order they lie in.

Owns the choice among the kernels' forms: float32, bfloat16, and grouped integers for every block format of GGUF, whose
integers are kept exactly. What is multiplied is ``packed``, given to a native program; ``apply`` and ``rows`` here
compute the same from the dequantised matrix, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from pagemill import _native
from pagemill.models.gguf_blocks import BLOCK_FORMATS
from pagemill.quant.int8 import round_rows
from pagemill.quant.matrix import Matrix
from pagemill.quant.method import LinearShape, Target

__all__ = ["NativeDenseMethod", "NativeGroupMethod", "NativeInt8Weight", "NativeWeight", "native_dense"]

logger = logging.getLogger(__name__)


class NativeWeight:
    """A matrix [out_features, in_features] in a kernel's layout."""

    def __init__(self, packed: _native.PackedLinear, shape: LinearShape) -> None:
        self.packed = packed
        self.out_features = shape.out_features
        self.in_features = shape.in_features
        self.gated = shape.gated
        self.bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix with its scales and bias."""
        return int(self.packed.nbytes)

    def pack_bias(self, bias: torch.Tensor) -> None:
        """Write the bias beside the matrix."""
        self.bias = bias
        self.packed.write_bias(0, bias)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias in x's type, from the dequantised matrix."""
        return F.linear(x.float(), self.dequantize(), self.bias).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows as float32: [N] -> [N, in_features]."""
        return self.dequantize()[ids.long()]

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32."""
        out = torch.empty(self.out_features, self.in_features)
        self.packed.unpack(out)
        return out


class _DenseWeight(NativeWeight):
    """Filled with plain numbers."""

    def pack(self, row: int, matrix: Matrix) -> None:
        """Convert ``matrix`` into the rows from ``row`` on."""
        dtype = torch.float32 if self.packed.kind == "f32" else torch.bfloat16
        for at, piece in matrix.chunks(dtype):
            self.packed.write_floats(row + at, piece.contiguous())


class NativeDenseMethod:
    """float32 stays float32; everything else is bfloat16."""

    def create(self, shape: LinearShape, matrices: Sequence[Matrix], target: Target) -> NativeWeight:
        """An empty matrix."""
        wide = {matrix.stored.type for matrix in matrices} & {"F32", "F64"}
        float32 = target.dtype == torch.float32 if target.explicit else bool(wide)
        packed = _native.PackedLinear(
            "f32" if float32 else "bf16", shape.out_features, shape.in_features, gated=shape.gated, bias=shape.bias
        )
        return _DenseWeight(packed, shape)


def native_dense(matrix: torch.Tensor) -> NativeWeight:
    """A computed matrix [out_features, in_features], as float32."""
    shape = LinearShape(out_features=matrix.shape[0], in_features=matrix.shape[1])
    weight = NativeWeight(_native.PackedLinear("f32", *matrix.shape), shape)
    weight.packed.write_floats(0, matrix.float().contiguous())
    return weight


class NativeInt8Weight(NativeWeight):
    """A matrix of int8 with one scale per output."""

    def __init__(self, shape: LinearShape) -> None:
        packed = _native.PackedLinear("int8", shape.out_features, shape.in_features, gated=shape.gated, bias=shape.bias)
        super().__init__(packed, shape)

    def write(self, row: int, q: torch.Tensor, scale: torch.Tensor) -> None:
        """Rows from ``row`` on: int8 [n, in_features], float32 [n]."""
        self.packed.write_int8(row, q.contiguous(), scale.contiguous())

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias in x's type, x rounded to int8 row by row."""
        rounded, scale = round_rows(x)
        product = F.linear(rounded.float(), self.dequantize()) * scale[:, None]
        return (product if self.bias is None else product + self.bias).to(x.dtype)


class _GroupWeight(NativeWeight):
    """Filled with a file's integers."""

    def pack(self, row: int, matrix: Matrix) -> None:
        """Write the integers of ``matrix`` as the rows from ``row`` on, its scales repeated if its groups are wider."""
        repeat = BLOCK_FORMATS[matrix.stored.type].group // self.packed.group
        for at, codes in matrix.codes():
            scale = np.ascontiguousarray(np.repeat(codes.scale, repeat, axis=1))
            minimum = None
            if self.packed.has_min:
                minimum = np.ascontiguousarray(np.repeat(codes.minimums(), repeat, axis=1))
            self.packed.write_groups(row + at, codes.q, scale, minimum, codes.zero)


class NativeGroupMethod:
    """The narrowest form that holds the integers of all parts as they are."""

    def create(self, shape: LinearShape, matrices: Sequence[Matrix], target: Target) -> NativeWeight:
        """An empty matrix of 4- or 8-bit groups."""
        forms = [BLOCK_FORMATS[matrix.stored.type] for matrix in matrices]
        group = min(form.group for form in forms)
        probes = [form.unpack(np.zeros((1, form.nbytes), np.uint8)) for form in forms]
        has_min = any(probe.minimum is not None for probe in probes)
        nibbles = all(form.bits <= 4 for form in forms) and group >= 32
        nibbles = nibbles and (has_min or all(probe.zero == 8 for probe in probes))
        packed = _native.PackedLinear(
            "group4" if nibbles else "group8",
            shape.out_features,
            shape.in_features,
            gated=shape.gated,
            bias=shape.bias,
            group=group,
            has_min=has_min,
            bits=max(form.bits for form in forms),
        )
        return _GroupWeight(packed, shape)
