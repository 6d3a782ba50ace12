"""How a model's steps are computed, and the KV memory that they read and write.

Owns the KV tensors. A backend is chosen once, at start; the runner does not know which one it drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import BlockCopy
from pagemill.kernels.ops import StepInputs
from pagemill.kernels.reference import KVLayer, ReferenceOps
from pagemill.model_config import ModelConfig
from pagemill.models.encoder import Model
from pagemill.sampling.picker import Extremes

__all__ = ["Backend", "Computed", "ReferenceBackend"]


class Computed(NamedTuple):
    """What a step computed for the tokens that were asked about. It holds until the next step; it may be changed."""

    rows: torch.Tensor
    """float32 [L, V] logits, or [L, H] vectors; anything where ``StepInputs.logits_kept`` is false."""
    extremes: Extremes | None = None
    """Of the logits, where they are found on the way."""


class Backend(Protocol):
    """Computes a model's steps over KV memory of its own."""

    name: str
    device: torch.device

    def forward(self, inputs: StepInputs) -> Computed:
        """Write the step's keys and values; compute the logits (or vectors) of ``inputs.logits_rows``."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks within their group's layers."""


class ReferenceBackend:
    """PyTorch's own functions, op by op, on any device."""

    name = "reference"

    @staticmethod
    def layer_block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> int:
        """Keys and values of one block of one layer."""
        scale_bytes = torch.bfloat16.itemsize if kv_dtype == torch.int8 else 0
        return 2 * block_size * config.num_kv_heads * (config.head_dim * kv_dtype.itemsize + scale_bytes)

    def __init__(
        self,
        model: Model,
        specs: Sequence[KVCacheSpec],
        kv_dtype: torch.dtype,
        device: torch.device,
        *,
        max_tokens: int,
        max_logits: int,
    ) -> None:
        del max_tokens, max_logits  # PyTorch allocates as it goes
        self.device = device
        self._model = model
        self._specs = specs
        self._caches: list[KVLayer] = []  # one per layer
        for attention in model.attention_specs:
            if not attention.causal and self._caches:
                self._caches.append(self._caches[0])
                continue
            spec = specs[attention.group]
            self._caches.append(
                KVLayer(spec.num_blocks, spec.block_size, attention.num_kv_heads, attention.head_dim, kv_dtype, device)
            )

    @torch.no_grad()
    def forward(self, inputs: StepInputs) -> Computed:
        """One pass of the model."""
        return Computed(self._model.forward(ReferenceOps(inputs, self._caches)))

    @torch.no_grad()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Layer by layer."""
        for copy in copies:
            for layer in self._specs[copy.group].layers:
                self._caches[layer].copy_block(copy.source, copy.target)
