"""Any checkpoint -> rotated int8, while loading.

Owns what is folded into which matrix. With Q the rotation of the residual stream, g a norm's weight, and H block
Hadamard transforms (design: quant/rotation.py):

::

    embedding   E Q                     rows come out rotated
    q, k        W diag(g) Q             the norm before them keeps only its scale: its weight is 1
    v           H W diag(g) Q           per head; undone in o
    o           Q^T W H                 its output joins the rotated stream
    gate, up    W diag(g) Q
    down        Q^T W H                 its input is transformed online, by the one op that this costs
    head        W diag(g) Q             or, tied to the embedding, x (Q^T diag(g) Q) before the same table

Where norms follow a block (OLMo-2, Gemma 2 and 3), their weights do not commute with Q: the stream is left as it is
there, and only the Hadamard transforms are used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pagemill.kernels.ops import LinearWeight
from pagemill.kernels.reference import hadamard
from pagemill.model_config import ModelConfig
from pagemill.models.loader import WeightLoader
from pagemill.models.tensors import TensorReader
from pagemill.quant.dense import DenseWeight
from pagemill.quant.int8 import Int8Weight, round_rows
from pagemill.quant.int8_cache import Int8Cache
from pagemill.quant.matrix import Matrix
from pagemill.quant.method import LinearShape, Target
from pagemill.quant.rotation import Rotation, hadamard_block

if TYPE_CHECKING:
    from pagemill.quant.native import NativeInt8Weight

__all__ = ["Int8Loader"]

logger = logging.getLogger(__name__)

NORM_OF = {"qkv": "attn_norm", "gate_up": "mlp_norm", "router": "mlp_norm", "head": "final_norm"}
"""Role -> the norm before it."""
INTO_STREAM = ("o", "down")
"""Roles whose output joins the residual stream."""
V = ("qkv", 2)
"""Role and part of the values' projection."""


class Int8Loader(WeightLoader):
    """Folds, rounds and packs; keeps the result in ``cache``."""

    def __init__(
        self, reader: TensorReader, model: ModelConfig, target: Target, positions: int, cache: Int8Cache
    ) -> None:
        super().__init__(reader, model, target, positions)
        self.cache = cache
        self.rotation = Rotation(model.hidden_size) if model.norm_placement == "pre" else None
        self.folded: dict[str, torch.Tensor] = {}
        """The latest norm weight of each role."""
        self.head_block = hadamard_block(model.head_dim)
        if self.rotation is None:
            logger.info(
                "int8 without rotation of the residual stream: the norms after each block of %s weigh its channels",
                model.architecture,
            )

    def norm(self, role: str, i: int, length: int) -> torch.Tensor:
        """The weight, or ones where it goes into the matrix that follows."""
        weight = super().norm(role, i, length)
        if self.rotation is None or role not in NORM_OF.values():
            return weight
        self.folded[role] = weight.cpu()
        return torch.ones_like(weight)

    def linear(
        self, role: str, i: int, matrices: Sequence[Matrix], *, bias: bool = False, gated: bool = False, expert: int = 0
    ) -> LinearWeight:
        """The matrices folded and rounded; a router is folded only."""
        if role == "router":
            return self.dense(self.fold(role, 0, _whole(matrices[0])))
        height, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        weight = self.create(LinearShape(out_features=height, in_features=width, bias=bias, gated=gated))
        row = 0
        for q, scale in self.cache.pieces(f"{role}.{i}.{expert}", self.rounded(role, matrices)):
            weight.write(row, q, scale)
            row += len(q)
        if bias:
            weight.pack_bias(self.fold_bias(role, matrices))
        return weight

    def create(self, shape: LinearShape) -> Int8Weight | NativeInt8Weight:
        """Room for one int8 matrix."""
        if self.target.native:
            from pagemill.quant.native import NativeInt8Weight

            return NativeInt8Weight(shape)
        return Int8Weight(shape, self.target.dtype, self.target.device)

    def rounded(self, role: str, matrices: Sequence[Matrix]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows top to bottom, folded and rounded. What mixes rows is taken whole, the rest a few rows at a time."""
        for part, matrix in enumerate(matrices):
            if role in INTO_STREAM or (role, part) == V:
                yield round_rows(self.fold(role, part, _whole(matrix)))
            else:
                for _, piece in matrix.chunks(torch.float32):
                    yield round_rows(self.fold(role, part, piece))

    def fold(self, role: str, part: int, w: torch.Tensor) -> torch.Tensor:
        """Rows [n, K] of a role with everything in it that its neighbours left out, float32."""
        rotation = self.rotation
        if rotation is not None and role in NORM_OF:
            w = rotation.columns(w * self.folded[NORM_OF[role]])
        elif rotation is not None and role == "embedding":
            w = rotation.columns(w)
        if (role, part) == V and self.head_block:
            w = hadamard(w.T, self.head_block).T
        if role == "o" and self.head_block:
            w = hadamard(w, self.head_block)
        if role == "down" and self.down_hadamard(w.shape[1]):
            w = hadamard(w, self.down_hadamard(w.shape[1]))
        return rotation.rows(w) if rotation is not None and role in INTO_STREAM else w

    def fold_bias(self, role: str, matrices: Sequence[Matrix]) -> torch.Tensor:
        """The bias of a role's outputs, changed as they are: float32 [N]."""
        bias = self.reader.bias(matrices)
        if role == "qkv" and self.head_block:
            kept = bias.shape[0] - matrices[V[1]].shape[0]
            return torch.cat((bias[:kept], hadamard(bias[kept:], self.head_block)))
        return self.rotation.columns(bias) if self.rotation is not None and role in INTO_STREAM else bias

    def down_hadamard(self, width: int) -> int:
        """Block of the transform on the inputs of a down projection."""
        return hadamard_block(width)

    def before_head(self) -> LinearWeight | None:
        """Q^T diag(g) Q, for a table that serves as embedding and head; diag(g) Q where hidden states are wanted."""
        if self.rotation is None:
            return None
        if self.model.pooling is not None:
            return self.dense(self.rotation.columns(torch.diag(self.folded["final_norm"])))
        if not self.model.tie_word_embeddings:
            return None
        weight = torch.diag(self.folded["final_norm"])
        return self.dense(self.rotation.rows(self.rotation.columns(weight)))

    def dense(self, matrix: torch.Tensor) -> LinearWeight:
        """A matrix that stays as it is."""
        if self.target.native:
            from pagemill.quant.native import native_dense

            return native_dense(matrix)
        return DenseWeight(matrix.contiguous().to(self.target.device), dtype=self.target.dtype)


def _whole(matrix: Matrix) -> torch.Tensor:
    return torch.cat([piece for _, piece in matrix.chunks(torch.float32)])
