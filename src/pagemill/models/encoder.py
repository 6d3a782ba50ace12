"""BERT's kind of encoder: every token sees every other, and norms stand after the residual is added.

Owns the order of operations; must not compute (see models/decoder.py, its neighbour). What comes out is the hidden
state of the rows that are asked for, or a classifier's scores of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagemill.kernels.ops import AttentionSpec, LinearWeight, Ops, Value
from pagemill.layers.attention import Attention
from pagemill.layers.mlp import MLP
from pagemill.layers.norm import LayerNorm
from pagemill.model_config import ModelConfig
from pagemill.models.decoder import Decoder

__all__ = ["Classifier", "Encoder", "EncoderLayer", "Model"]


@dataclass(slots=True, eq=False, kw_only=True)
class EncoderLayer:
    """One block, each half followed by its norm."""

    attention: Attention
    attention_norm: LayerNorm
    mlp: MLP
    mlp_norm: LayerNorm

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        x = self.attention_norm.forward(ops, ops.add(x, self.attention.forward(ops, x)))
        return self.mlp_norm.forward(ops, ops.add(x, self.mlp.forward(ops, x)))


@dataclass(slots=True, eq=False, kw_only=True)
class Classifier:
    """From a sequence's first hidden state to its scores."""

    pooler: LinearWeight  # [H, H], followed by tanh
    scores: LinearWeight  # [num_scores, H]

    def forward(self, ops: Ops, x: Value) -> Value:
        """[L, H] -> [L, num_scores]."""
        return ops.linear(ops.activate(ops.linear(x, self.pooler), "tanh"), self.scores)


@dataclass(slots=True, eq=False, kw_only=True)
class Encoder:
    """A whole model."""

    config: ModelConfig
    dtype: torch.dtype
    """Of activations."""
    max_positions: int
    """No token may stand at this position or past it."""
    embedding: LinearWeight  # [V, H]
    position_table: torch.Tensor
    """[type_vocab_size * max_position_embeddings, H]: the position's vector and the segment's, summed.

    Row ``segment * max_position_embeddings + position``; a step's ``positions`` are such rows.
    """
    embedding_norm: LayerNorm
    layers: Sequence[EncoderLayer]
    classifier: Classifier | None = None

    def forward(self, ops: Ops) -> Value:
        """The step's tokens -> float32 [L, result_size] of the rows that are asked for."""
        x = ops.add(ops.embed(self.embedding, 1.0), ops.positions(self.position_table))
        x = self.embedding_norm.forward(ops, x)
        for layer in self.layers:
            x = layer.forward(ops, x)
        x = ops.select_rows(x)
        return ops.result(x if self.classifier is None else self.classifier.forward(ops, x))

    @property
    def result_size(self) -> int:
        """Columns of what comes out."""
        return self.config.hidden_size if self.classifier is None else self.classifier.scores.out_features

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """One per layer."""
        return [layer.attention.spec for layer in self.layers]

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        matrices = [
            self.embedding,
            *(w for layer in self.layers for w in (*layer.attention.weights, *layer.mlp.weights)),
        ]
        if self.classifier is not None:
            matrices += [self.classifier.pooler, self.classifier.scores]
        norms = [self.embedding_norm, *(norm for each in self.layers for norm in (each.attention_norm, each.mlp_norm))]
        packed = sum(matrix.nbytes for matrix in matrices)
        return packed + sum(norm.nbytes for norm in norms) + self.position_table.nbytes


Model = Decoder | Encoder
