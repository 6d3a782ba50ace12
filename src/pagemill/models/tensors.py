"""A checkpoint's tensors by role: found, checked and cut for this rank.

Owns names, shapes and shares; must not convert or pack. Every tensor of the file is either used or known to be
dispensable: :meth:`TensorReader.finish` names what is left over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagemill.errors import ModelFormatError
from pagemill.layers.parallel import Group, Shard, share
from pagemill.models.checkpoint import Checkpoint, StoredTensor
from pagemill.models.families import Family
from pagemill.quant.matrix import Matrix

__all__ = ["TensorReader"]

logger = logging.getLogger(__name__)

PREFIXES = ("model.", "language_model.model.", "model.language_model.", "", "bert.", "roberta.")
"""Where the text model sits in a safetensors checkpoint."""
DISPENSABLE = (
    "rotary_emb.inv_freq",
    "attn_rot_embd.weight",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "embeddings.position_ids",
)
"""Endings of tensors whose content is in the configuration."""
NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Beginnings of tensors of a multimodal checkpoint that a text model does not use."""


NOT_POOLING = ("lm_head.weight", "output.weight", "pooler.dense.weight", "pooler.dense.bias", "cls.")
"""Beginnings, below the prefix, of tensors that a model which pools does not use."""


class TensorReader:
    """Reads one checkpoint for one rank of a group."""

    def __init__(self, checkpoint: Checkpoint, family: Family, group: Group) -> None:
        self.checkpoint = checkpoint
        self.group = group
        self.is_gguf = checkpoint.format == "gguf"
        self.permuted = self.is_gguf and family.gguf_permuted
        self._names = family.gguf_names if self.is_gguf else family.names
        self._prefix = "" if self.is_gguf else self._find_prefix()
        self._used: set[str] = set()

    def _find_prefix(self) -> str:
        tables = {prefix: f"{prefix}{self._names['embedding']}.weight" for prefix in PREFIXES}
        return next((prefix for prefix, name in tables.items() if name in self.checkpoint), PREFIXES[0])

    def has(self, role: str) -> bool:
        """Whether the family's files know this role."""
        return role in self._names

    def name(self, role: str, layer: int = 0, expert: int = 0) -> str:
        """The stored name of a role, without its ending."""
        if role == "head" and not self.is_gguf:
            return "language_model.lm_head" if self._prefix.startswith("language_model.") else "lm_head"
        if self._names[role].startswith("classifier"):
            return self._names[role]
        return self._prefix + self._names[role].format(i=layer, e=expert)

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        shard: Shard = Shard.WHOLE,
        order: npt.NDArray[np.int64] | None = None,
    ) -> Matrix:
        """This rank's part of the matrix ``name``.weight of ``shape`` [N, K]."""
        rows, columns = self._share(name, shape, shard)
        return Matrix(stored=self._stored(name + ".weight", shape), order=order, rows=rows, columns=columns)

    def fused(self, name: str, heights: Sequence[int], width: int) -> list[Matrix]:
        """This rank's rows of each of the matrices that ``name``.weight stacks."""
        stored = self._stored(name + ".weight", (sum(heights), width))
        parts, first = [], 0
        for height in heights:
            rows, _ = self._share(name, (height, width), Shard.ROWS)
            parts.append(Matrix(stored=stored, rows=slice(first + rows.start, first + rows.stop)))
            first += height
        return parts

    def expert(self, role: str, layer: int, e: int, count: int, shape: tuple[int, int], shard: Shard) -> Matrix:
        """One expert's matrix, a tensor of its own or a part of one that holds all ``count``."""
        name = self.name(role, layer, e)
        if "{e}" in self._names[role]:
            return self.matrix(name, shape, shard)
        rows, columns = self._share(name, shape, shard)
        return Matrix(stored=self._stored(name + ".weight", (count, *shape)), expert=e, rows=rows, columns=columns)

    def table(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A whole table as float32."""
        return self._stored(name + ".weight", shape).to_torch(torch.float32)

    def vector(self, name: str, length: int) -> torch.Tensor:
        """A whole vector as float32 [length]."""
        return self._stored(name, (length,)).to_torch(torch.float32)

    def bias(self, matrices: Sequence[Matrix]) -> torch.Tensor:
        """The biases beside the matrices, in the same rows, as float32 [rows of all]."""
        parts = []
        for matrix in matrices:
            length = matrix.stored.shape[0]
            whole = self.vector(matrix.stored.name.removesuffix("weight") + "bias", length)
            if matrix.order is not None:
                whole = whole[torch.from_numpy(matrix.order)]
            parts.append(whole[matrix.rows])
        return torch.cat(parts)

    def finish(self, *, tied: bool, pools: bool = False) -> None:
        """Raise :class:`ModelFormatError` if a tensor was not used that could have changed the result."""
        duplicate = self.name("head") + ".weight"
        extra = []
        for name in self.checkpoint.names():
            if name in self._used or name.endswith(DISPENSABLE) or name.startswith(NOT_TEXT):
                continue
            if name == duplicate and tied:
                logger.info("%s repeats the embedding, to which the head is tied; it is not loaded", name)
                continue
            if pools and name.removeprefix(self._prefix).startswith(NOT_POOLING):
                continue
            extra.append(name)
        if extra:
            shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            raise ModelFormatError(
                f"{len(extra)} tensors of the checkpoint have no place in this architecture: {shown}; "
                "its configuration does not belong to these weights"
            )

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor; raises ModelFormatError if it is missing or of another shape."""
        if name not in self.checkpoint:
            raise ModelFormatError(f"tensor {name!r} of shape {list(shape)} is missing; the checkpoint is incomplete")
        stored = self.checkpoint.tensor(name)
        if tuple(stored.shape) != shape:
            raise ModelFormatError(f"tensor {name!r} has shape {list(stored.shape)}; expected {list(shape)}")
        self._used.add(name)
        return stored

    def _share(self, name: str, shape: tuple[int, int], shard: Shard) -> tuple[slice, slice]:
        """Rows and columns of this rank."""
        height, width = shape
        rows = share(height, self.group, name) if shard is Shard.ROWS else slice(0, height)
        columns = share(width, self.group, name) if shard is Shard.COLUMNS else slice(0, width)
        return rows, columns
