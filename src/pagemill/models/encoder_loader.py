"""A checkpoint -> an Encoder.

Owns what only encoders have: position and segment tables, norms with biases, the classifier of a cross-encoder. The
rest is the decoders' loader's.
"""

from __future__ import annotations

import torch

from pagemill.errors import ConfigError
from pagemill.kernels.ops import LinearWeight
from pagemill.layers.mlp import MLP
from pagemill.layers.norm import LayerNorm
from pagemill.models.encoder import Classifier, Encoder, EncoderLayer
from pagemill.models.loader import WeightLoader

__all__ = ["EncoderLoader"]


class EncoderLoader(WeightLoader):
    """Reads the weights of one encoder."""

    def encoder(self) -> Encoder:
        """All weights, in the order of use."""
        if self.target.quantization is not None:
            raise ConfigError(
                f"--quantization={self.target.quantization} is for decoders; leave it out, or use --dtype=bfloat16"
            )
        model = self.model
        embedding = self.table_matrix("embedding")
        table = self.position_table()
        norm = self.layer_norm("embedding_norm", 0)
        layers = [self.encoder_layer(i) for i in range(model.num_layers)]
        return Encoder(
            config=model,
            dtype=self.target.dtype,
            max_positions=model.max_position_embeddings,
            embedding=embedding,
            position_table=table,
            embedding_norm=norm,
            layers=layers,
            classifier=self.classifier() if model.pooling is not None and model.pooling.num_scores else None,
        )

    def position_table(self) -> torch.Tensor:
        """Sums of a position's and a segment's vectors: [segments * positions, H]."""
        model, reader = self.model, self.reader
        stored = model.position_offset + model.max_position_embeddings
        positions = reader.table(reader.name("position"), (stored, model.hidden_size))[model.position_offset :]
        segments = reader.table(reader.name("segment"), (model.type_vocab_size, model.hidden_size))
        sums = (segments[:, None, :] + positions[None, :, :]).flatten(0, 1)
        # The native kernels compute in float32 whatever the weights are.
        return sums.to(self.target.device, torch.float32 if self.target.native else self.target.dtype)

    def layer_norm(self, role: str, i: int) -> LayerNorm:
        """Weight and bias as float32."""
        name, hidden = self.reader.name(role, i), self.model.hidden_size
        weight, bias = (
            self.reader.vector(f"{name}.{part}", hidden).to(self.target.device) for part in ("weight", "bias")
        )
        return LayerNorm(weight=weight, bias=bias, eps=self.model.norm_eps)

    def encoder_layer(self, i: int) -> EncoderLayer:
        """One block."""
        model = self.model
        attention = self.attention(i, model.layers[i])
        attention_norm = self.layer_norm("attn_post_norm", i)
        up = self.biased("up", i, (model.intermediate_size, model.hidden_size))
        down = self.biased("down", i, (model.hidden_size, model.intermediate_size))
        return EncoderLayer(
            attention=attention,
            attention_norm=attention_norm,
            mlp=MLP(up=up, down=down, activation=model.hidden_act),
            mlp_norm=self.layer_norm("mlp_post_norm", i),
        )

    def classifier(self) -> Classifier:
        """A cross-encoder's last two products."""
        model = self.model
        assert model.pooling is not None
        return Classifier(
            pooler=self.biased("pooler", 0, (model.hidden_size, model.hidden_size)),
            scores=self.biased("classifier", 0, (model.pooling.num_scores, model.hidden_size)),
        )

    def biased(self, role: str, i: int, shape: tuple[int, int]) -> LinearWeight:
        """A matrix of its own with a bias beside it."""
        return self.linear(role, i, [self.reader.matrix(self.reader.name(role, i), shape)], bias=True)
