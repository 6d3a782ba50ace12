"""The seam of quantisation: a scheme's name -> LinearMethod.

Owns the registry and the choice for each layer. Methods are imported when first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagemill.errors import ConfigError
from pagemill.kernels.ops import LinearWeight
from pagemill.quant.matrix import Matrix

__all__ = ["METHODS", "LinearMethod", "LinearShape", "PackableWeight", "Target", "choose", "method"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where weights are kept, and what runs through them."""

    dtype: torch.dtype
    """Of activations."""
    device: torch.device
    explicit: bool
    """The user named the type, so nothing else is kept."""
    native: bool = False
    """The native kernels will run."""
    quantization: str | None = None
    """What to turn the weights into, if not what the file says."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The matrix that a layer needs."""

    out_features: int
    in_features: int
    bias: bool = False
    gated: bool = False
    """The rows are gate's, then up's: kernels may keep them for act(gate) * up."""


class PackableWeight(LinearWeight, Protocol):
    """A weight that is filled from the checkpoint, part after part."""

    def pack(self, row: int, matrix: Matrix) -> None:
        """Take ``matrix`` as the rows from ``row`` on."""

    def pack_bias(self, bias: torch.Tensor) -> None:
        """Take the bias, float32 [out_features]."""


class LinearMethod(Protocol):
    """One way to keep a matrix."""

    def create(self, shape: LinearShape, matrices: Sequence[Matrix], target: Target) -> PackableWeight:
        """Room for a matrix that will be packed from ``matrices``, which tell their stored types."""


METHODS: dict[str, str] = {
    "dense": "pagemill.quant.dense:DenseMethod",
    "blocks": "pagemill.quant.blocks:BlockMethod",
    "native-dense": "pagemill.quant.native:NativeDenseMethod",
    "native-groups": "pagemill.quant.native:NativeGroupMethod",
}
"""Scheme -> where its method is."""


def method(scheme: str) -> LinearMethod:
    """The method of a scheme; :class:`ConfigError` lists those that exist."""
    if scheme not in METHODS:
        raise ConfigError(f"quantisation scheme {scheme!r} is unknown; known are {', '.join(sorted(METHODS))}")
    module, name = METHODS[scheme].split(":")
    found: LinearMethod = getattr(importlib.import_module(module), name)()
    return found


def choose(matrices: Sequence[Matrix], target: Target) -> str:
    """The scheme for one layer's matrices: the file's own integers where they can run, else plain numbers."""
    keep_blocks = all(matrix.is_blocks for matrix in matrices) and not target.explicit and target.device.type == "cpu"
    if target.native:
        return "native-groups" if keep_blocks else "native-dense"
    return "blocks" if keep_blocks else "dense"
