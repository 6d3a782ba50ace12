"""One decoder for every family: blocks of attention and MLP over a residual stream.

Owns the order of operations; must not compute. Everything goes through an Ops, so the same code computes with PyTorch
or is recorded into a native program. Differences between families are numbers and absent norms, never classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagemill.kernels.ops import AttentionSpec, LinearWeight, Ops, Value
from pagemill.layers.attention import Attention
from pagemill.layers.mlp import Experts, GatedMLP
from pagemill.model_config import ModelConfig

__all__ = ["Decoder", "DecoderLayer"]


@dataclass(slots=True, eq=False, kw_only=True)
class DecoderLayer:
    """One block. Norms stand before a half (Llama), after it (OLMo-2) or on both sides (Gemma 2 and 3)."""

    attn_norm: torch.Tensor | None  # [H]
    attention: Attention
    attn_post_norm: torch.Tensor | None  # [H]
    mlp_norm: torch.Tensor | None  # [H]
    mlp: GatedMLP | Experts
    mlp_post_norm: torch.Tensor | None  # [H]
    norm_eps: float
    residual_scale: float

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        x = self._half(ops, x, self.attn_norm, self.attention, self.attn_post_norm)
        return self._half(ops, x, self.mlp_norm, self.mlp, self.mlp_post_norm)

    def _half(
        self,
        ops: Ops,
        x: Value,
        before: torch.Tensor | None,
        body: Attention | GatedMLP | Experts,
        after: torch.Tensor | None,
    ) -> Value:
        inner = x if before is None else ops.rms_norm(x, before, self.norm_eps)
        inner = body.forward(ops, inner)
        if after is not None:
            inner = ops.rms_norm(inner, after, self.norm_eps)
        return ops.add(x, inner, self.residual_scale)

    @property
    def norms(self) -> list[torch.Tensor]:
        """The norm weights it has, those of queries and keys too."""
        spec = self.attention.spec
        every = [self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm, spec.q_norm, spec.k_norm]
        return [norm for norm in every if norm is not None]


@dataclass(slots=True, eq=False, kw_only=True)
class Decoder:
    """A whole model. A tied head is the embedding itself; a model that pools has none."""

    config: ModelConfig
    dtype: torch.dtype
    """Of activations."""
    max_positions: int
    """Length of the rope tables: no position may reach it."""
    embedding: LinearWeight  # [V, H]
    layers: Sequence[DecoderLayer]
    final_norm: torch.Tensor  # [H]
    head: LinearWeight | None  # [V, H]
    before_head: LinearWeight | None = None  # [H, H]
    """Where the residual stream is rotated and the head is not made for that."""

    def forward(self, ops: Ops) -> Value:
        """The step's tokens -> float32 logits [L, V] of the rows that need them, or without a head [L, H]."""
        config = self.config
        x = ops.embed(self.embedding, config.embedding_scale)
        for layer in self.layers:
            x = layer.forward(ops, x)
        x = ops.rms_norm(ops.select_rows(x), self.final_norm, config.norm_eps)
        if self.before_head is not None:
            x = ops.linear(x, self.before_head)
        if self.head is None:
            return ops.result(x)
        return ops.logits(x, self.head, config.logits_scale, config.logits_softcap)

    @property
    def result_size(self) -> int:
        """Columns of what comes out."""
        return self.config.hidden_size if self.head is None else self.config.vocab_size

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """One per layer. ``group`` numbers the kinds: full attention first where there is any, then each window."""
        return [layer.attention.spec for layer in self.layers]

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, rope tables included; a tied head counts once."""
        matrices = [
            self.embedding,
            *(w for layer in self.layers for w in (*layer.attention.weights, *layer.mlp.weights)),
        ]
        if self.head is not None and self.head is not self.embedding:
            matrices.append(self.head)
        if self.before_head is not None:
            matrices.append(self.before_head)
        norms = [self.final_norm, *(norm for layer in self.layers for norm in layer.norms)]
        tables = {id(spec.rope_table): spec.rope_table for spec in self.attention_specs if spec.rope_table is not None}
        packed = sum(matrix.nbytes for matrix in matrices)
        return packed + sum(tensor.nbytes for tensor in (*norms, *tables.values()))
