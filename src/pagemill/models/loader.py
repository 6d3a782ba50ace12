"""A checkpoint -> a model, streaming: a few megabytes of one stored tensor are in flight at a time.

Owns the order of loading (that of use) and what is merged: q, k and v into one matrix, gate and up into one. Which
tensor that is and which part of it belongs to this rank is models/tensors.py's; how a matrix is kept is quant/'s.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pagemill.config import EngineConfig, cache_dir
from pagemill.errors import ConfigError
from pagemill.kernels.ops import AttentionSpec, LinearWeight, MoeWeights
from pagemill.layers.attention import Attention
from pagemill.layers.mlp import Experts, GatedMLP
from pagemill.layers.parallel import SOLO, Group, Shard
from pagemill.layers.rotary import longest_context, rope_table
from pagemill.model_config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from pagemill.models.checkpoint import Checkpoint
from pagemill.models.decoder import Decoder, DecoderLayer
from pagemill.models.families import family_of, model_config
from pagemill.models.pooling import pooling_of, usual_context
from pagemill.models.tensors import TensorReader
from pagemill.quant.matrix import Matrix
from pagemill.quant.method import LinearShape, Target, choose, method

if TYPE_CHECKING:
    from pagemill.models.encoder import Model

__all__ = ["WeightLoader", "load_model"]

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    native: bool,
    device: torch.device | None = None,
    group: Group = SOLO,
) -> Model:
    """Read the weights of ``checkpoint`` into a model.

    The rope tables get ``config.max_model_len`` positions, or the model's own number. Raises ModelFormatError,
    UnsupportedModelError, or ConfigError where the length asked for is longer than the model can go.
    """
    model = model_config(checkpoint)
    pooling = pooling_of(checkpoint, model, config)
    if pooling is not None:
        model = dataclasses.replace(model, pooling=pooling, usual_context=usual_context(checkpoint, model))
    positions = config.max_model_len or model.max_position_embeddings
    if positions > longest_context(model):
        raise ConfigError(
            f"--max-model-len={positions} is longer than the model's {longest_context(model)} positions; lower it"
        )
    target = Target(
        dtype=DTYPES.get(config.dtype) or _activation_dtype(checkpoint, native),
        device=device or torch.device("cpu"),
        explicit=config.dtype != "auto",
        native=native,
        quantization=config.quantization,
    )
    halves = any(checkpoint.tensor(name).type == "F16" for name in checkpoint.names())
    if native and (config.dtype == "float16" or (halves and config.dtype == "auto")):
        logger.info("float16 weights become bfloat16, which the native kernels multiply with")
    reader = TensorReader(checkpoint, family_of(checkpoint), group)
    loaded = _model(reader, model, target, positions)
    reader.finish(tied=model.tie_word_embeddings, pools=pooling is not None)
    return loaded


def _model(reader: TensorReader, model: ModelConfig, target: Target, positions: int) -> Model:
    """All weights, converted where the user asked for it."""
    if not model.causal:
        from pagemill.models.encoder_loader import EncoderLoader

        return EncoderLoader(reader, model, target, positions).encoder()
    if target.quantization != "int8":
        return WeightLoader(reader, model, target, positions).decoder()
    from pagemill.models.int8 import Int8Loader
    from pagemill.quant.int8_cache import Int8Cache

    logger.info("weights become rotated int8; the result is kept for the next start")
    variant = f"rank {reader.group.rank} of {reader.group.size}, {model}"
    with Int8Cache(cache_dir(), reader.checkpoint.paths, variant) as cache:
        return Int8Loader(reader, model, target, positions, cache).decoder()


def _activation_dtype(checkpoint: Checkpoint, native: bool) -> torch.dtype:
    """What runs through the model if the user names nothing.

    float32 for a float32 file and bfloat16 for a bfloat16 one. Of the others, float16 overflows and quantised blocks
    stand for float32 numbers, so PyTorch's functions get float32; the native kernels sum in float32 anyway, and their
    KV cache is well served by bfloat16.
    """
    tensors = [checkpoint.tensor(name) for name in checkpoint.names()]
    types = {part.type for part in tensors if len(part.shape) > 1 and part.type != "I64"}  # I64: a table of positions
    narrow = types != {"F32"} if native else types == {"BF16"}
    return torch.bfloat16 if narrow else torch.float32


class WeightLoader:
    """What loading keeps between tensors."""

    def __init__(self, reader: TensorReader, model: ModelConfig, target: Target, positions: int) -> None:
        self.reader = reader
        self.model = model
        self.target = target
        self.positions = positions
        self.tables: dict[RopeConfig, torch.Tensor] = {}
        windows = {layer.window for layer in model.layers}
        self.kinds = sorted(windows, key=lambda window: (window is not None, window or 0))

    def decoder(self) -> Decoder:
        """All weights, in the order of use."""
        model = self.model
        embedding = self.table_matrix("embedding")
        layers = [self.layer(i, layer) for i, layer in enumerate(model.layers)]
        final_norm = self.norm("final_norm", 0, model.hidden_size)
        return Decoder(
            config=model,
            dtype=self.target.dtype,
            max_positions=self.positions,
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            head=self.head(embedding),
            before_head=self.before_head(),
        )

    def head(self, embedding: LinearWeight) -> LinearWeight | None:
        """What makes logits of hidden states, in a model that generates."""
        if self.model.pooling is not None:
            return None
        return embedding if self.model.tie_word_embeddings else self.table_matrix("head")

    def table_matrix(self, role: str) -> LinearWeight:
        """The embedding or the head: [V, H]."""
        shape = (self.model.vocab_size, self.model.hidden_size)
        return self.linear(role, 0, [self.reader.matrix(self.reader.name(role), shape)])

    def layer(self, i: int, layer: LayerConfig) -> DecoderLayer:
        """One block."""
        model, hidden = self.model, self.model.hidden_size
        before, after = model.norm_placement in ("pre", "sandwich"), model.norm_placement in ("post", "sandwich")
        return DecoderLayer(
            attn_norm=self.norm("attn_norm", i, hidden) if before else None,
            attention=self.attention(i, layer),
            attn_post_norm=self.norm("attn_post_norm", i, hidden) if after else None,
            mlp_norm=self.norm("mlp_norm", i, hidden) if before else None,
            mlp=self.mlp(i) if layer.moe is None else self.experts(i, layer.moe),
            mlp_post_norm=self.norm("mlp_post_norm", i, hidden) if after else None,
            norm_eps=model.norm_eps,
            residual_scale=model.residual_scale,
        )

    def norm(self, role: str, i: int, length: int) -> torch.Tensor:
        """A norm's weight as float32 [length], the family's offset added if the file has not."""
        weight = self.reader.vector(self.reader.name(role, i) + ".weight", length)
        return (weight + self.model.norm_weight_offset).to(self.target.device)

    def linear(
        self, role: str, i: int, matrices: Sequence[Matrix], *, bias: bool = False, gated: bool = False, expert: int = 0
    ) -> LinearWeight:
        """The matrices of a role in layer ``i``, stacked into one packed weight, with the biases beside them."""
        height, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        shape = LinearShape(out_features=height, in_features=width, bias=bias, gated=gated)
        weight = method(choose(matrices, self.target)).create(shape, matrices, self.target)
        row = 0
        for matrix in matrices:
            weight.pack(row, matrix)
            row += matrix.shape[0]
        if bias:
            weight.pack_bias(self.reader.bias(matrices))
        return weight

    def attention(self, i: int, layer: LayerConfig) -> Attention:
        """q, k and v merged, with half-split rotary pairs; then o."""
        model, reader, dim, hidden = self.model, self.reader, self.model.head_dim, self.model.hidden_size
        heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
        if reader.has("qkv"):
            qkv = reader.fused(reader.name("qkv", i), [count * dim for count in heads.values()], hidden)
        else:
            qkv = [
                reader.matrix(reader.name(role, i), (count * dim, hidden), Shard.ROWS, self.order(role, count))
                for role, count in heads.items()
            ]
        o = reader.matrix(reader.name("o", i), (hidden, model.num_heads * dim), Shard.COLUMNS)
        return Attention(
            qkv=self.linear("qkv", i, qkv, bias=model.qkv_bias),
            o=self.linear("o", i, [o], bias=model.o_bias),
            spec=self.spec(i, layer),
        )

    def order(self, role: str, heads: int) -> npt.NDArray[np.int64] | None:
        """Stored row of each row of q or k, where llama.cpp's converter interleaved the two halves of each head."""
        if not self.reader.permuted or role == "v":
            return None
        half = self.model.head_dim // 2
        return np.arange(heads * 2 * half, dtype=np.int64).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)

    def spec(self, i: int, layer: LayerConfig) -> AttentionSpec:
        """The constants of one layer's attention."""
        model, ranks = self.model, self.reader.group.size
        q_norm = k_norm = None
        if model.qk_norm is not None:
            whole = model.qk_norm == "full"
            q_norm = self.norm("q_norm", i, model.head_dim * (model.num_heads if whole else 1))
            k_norm = self.norm("k_norm", i, model.head_dim * (model.num_kv_heads if whole else 1))
        return AttentionSpec(
            layer=i,
            group=self.kinds.index(layer.window),
            num_heads=model.num_heads // ranks,
            num_kv_heads=model.num_kv_heads // ranks,
            head_dim=model.head_dim,
            scale=model.attention_scale,
            window=layer.window,
            softcap=model.attention_softcap,
            rope=layer.rope,
            rope_table=None if layer.rope is None else self.rope_table(layer.rope),
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=model.norm_eps,
            causal=model.causal,
        )

    def rope_table(self, rope: RopeConfig) -> torch.Tensor:
        """The rope table, shared by all layers that rotate alike."""
        if rope not in self.tables:
            table = rope_table(rope, self.positions, self.model.max_position_embeddings)
            self.tables[rope] = table.to(self.target.device)
        return self.tables[rope]

    def mlp(self, i: int) -> GatedMLP:
        """Gate and up merged, then down."""
        model, reader = self.model, self.reader
        inner, hidden = model.intermediate_size, model.hidden_size
        if reader.has("gate_up"):
            gate_up = reader.fused(reader.name("gate_up", i), [inner, inner], hidden)
        else:
            gate_up = [reader.matrix(reader.name(role, i), (inner, hidden), Shard.ROWS) for role in ("gate", "up")]
        down = reader.matrix(reader.name("down", i), (hidden, inner), Shard.COLUMNS)
        return GatedMLP(
            gate_up=self.linear("gate_up", i, gate_up, bias=model.mlp_bias, gated=True),
            down=self.linear("down", i, [down], bias=model.mlp_bias),
            activation=model.hidden_act,
            down_hadamard=self.down_hadamard(down.shape[1]),
        )

    def experts(self, i: int, moe: MoeConfig) -> Experts:
        """The router and its experts."""
        reader, inner, hidden = self.reader, moe.intermediate_size, self.model.hidden_size
        router = self.linear("router", i, [reader.matrix(reader.name("router", i), (moe.num_experts, hidden))])
        gate_up, down = [], []
        for e in range(moe.num_experts):
            pair = [
                reader.expert(role, i, e, moe.num_experts, (inner, hidden), Shard.ROWS)
                for role in ("expert_gate", "expert_up")
            ]
            gate_up.append(self.linear("gate_up", i, pair, gated=True, expert=e))
            out = reader.expert("expert_down", i, e, moe.num_experts, (hidden, inner), Shard.COLUMNS)
            down.append(self.linear("down", i, [out], expert=e))
        return Experts(
            moe=MoeWeights(
                router=router,
                gate_up=gate_up,
                down=down,
                experts_per_token=moe.num_experts_per_token,
                renormalize=moe.renormalize,
                activation=self.model.hidden_act,
                down_hadamard=self.down_hadamard(down[0].in_features),
            )
        )

    def down_hadamard(self, width: int) -> int:
        """Block of the transform on the inputs of a down projection; none unless weights are converted."""
        return 0

    def before_head(self) -> LinearWeight | None:
        """What the final hidden states go through before a head that was not made for them; none here."""
        return None
