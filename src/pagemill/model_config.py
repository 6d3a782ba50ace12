"""What a model is, as data: every family is one :class:`ModelConfig`.

Must not read files or import torch. models/families.py fills it from a checkpoint's own configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerConfig", "ModelConfig", "MoeConfig", "PoolingConfig", "RopeConfig"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer."""

    theta: float = 10_000.0
    rotary_dim: int
    """Rotated dimensions of each head, <= head_dim."""
    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), ... instead of (i, i + rotary_dim / 2)."""
    scaling: str = "default"
    """default, linear, dynamic, yarn, longrope, llama3."""
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    long_factor: tuple[float, ...] | None = None
    short_factor: tuple[float, ...] | None = None
    freq_factors: tuple[float, ...] | None = None
    """GGUF's rope_freqs tensor: divides the inverse frequencies; already holds llama3 scaling."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts in place of the MLP."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalize: bool
    """Scale the chosen experts' weights to sum to 1."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None
    """A query sees this many positions, itself included; None sees all."""
    rope: RopeConfig | None
    """None: no position embedding in this layer (SmolLM3's NoPE)."""
    moe: MoeConfig | None = None


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How hidden states become one vector for each sequence, where a model makes vectors and no text."""

    kind: str
    """cls (the first token's), last (the last token's) or mean (all tokens')."""
    normalize: bool = True
    """Vectors have length 1 unless a request says otherwise."""
    num_scores: int = 0
    """Outputs of a classifier over the pooled state, in place of an embedding; a cross-encoder has one. 0: none."""
    score_activation: str = "identity"
    """What is applied to scores: sigmoid, softmax or identity."""
    labels: tuple[str, ...] = ()
    """Names of the scores, where the model's files name each."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer: a decoder, or an encoder (``causal`` is False). Sizes are numbers of elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    norm_eps: float
    norm_weight_offset: float = 0.0
    """Added to stored norm weights at load (Gemma safetensors: 1; Gemma GGUF: already added)."""
    norm_placement: str = "pre"
    """pre (Llama), post (OLMo-2: on the outputs alone), sandwich (Gemma 2 and 3: both)."""
    hidden_act: str = "silu"
    """silu, gelu_tanh or (encoders) gelu."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    """None, head (Qwen3, Gemma 3: over head_dim) or full (OLMo-2: over all heads)."""
    attention_scale: float
    """Multiplies q k^T; 1/sqrt(head_dim) unless the family says otherwise."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies each block's output before it is added (Granite)."""
    logits_scale: float = 1.0
    """Multiplies the logits (Granite: 1 / logits_scaling)."""
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    causal: bool = True
    """A token sees those before it. An encoder's tokens see all: a sequence is computed in one step, and not cached."""
    type_vocab_size: int = 0
    """Kinds of segments that an encoder tells apart."""
    position_offset: int = 0
    """Rows of an encoder's stored position table that no token has."""
    usual_context: int | None = None
    """Longest context unless the user names one, where that is less than max_position_embeddings."""
    pooling: PoolingConfig | None = None
    """None: the model generates."""

    @property
    def num_layers(self) -> int:
        """Decoder blocks."""
        return len(self.layers)
