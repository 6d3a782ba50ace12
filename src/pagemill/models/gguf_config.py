"""GGUF metadata -> ModelConfig.

Owns what llama.cpp's keys mean, and what llama.cpp knows without a key (Gemma 3's second theta, SmolLM3's layers
without position embedding). Rope scaling that arrives as a tensor becomes numbers in the configuration here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.model_config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from pagemill.models.families import Family
from pagemill.models.settings import MAX_LAYERS, MAX_SIZE, Settings

if TYPE_CHECKING:
    from pagemill.models.checkpoint import Checkpoint

__all__ = ["from_metadata"]

ROPE_SCALINGS = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
GEMMA_LOCAL_THETA = 10_000.0
WIDE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries are scaled by hidden_size / num_heads instead of head_dim."""


def from_metadata(family: Family, checkpoint: Checkpoint) -> ModelConfig:
    """The model that a GGUF file's metadata describes; raises ModelFormatError or UnsupportedModelError."""
    assert family.gguf is not None
    prefix = family.gguf + "."
    metadata = checkpoint.config
    settings = Settings(
        {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
        f"GGUF metadata of {family.gguf}",
    )
    hidden = settings.size("embedding_length")
    heads = settings.size("attention.head_count")
    head_dim = settings.size("attention.key_length", hidden // heads)
    value_dim = settings.size("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(f"values of {value_dim} and keys of {head_dim} dimensions are not supported")
    tokenizer = Settings(metadata, "GGUF metadata")
    is_moe = "expert_count" in settings.values and settings.number("expert_count") > 0
    moe = _moe(settings) if is_moe else None
    count = settings.size("block_count", most=MAX_LAYERS)
    return ModelConfig(
        architecture="mixtral" if family.name == "llama" and moe else family.name,
        vocab_size=_vocab_size(checkpoint),
        hidden_size=hidden,
        intermediate_size=settings.size("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=settings.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        layers=_layers(family, settings, checkpoint, head_dim, count, moe),
        max_position_embeddings=_max_positions(settings),
        norm_eps=settings.positive("attention.layer_norm_rms_epsilon"),
        norm_placement=family.norm_placement,
        hidden_act="gelu_tanh" if family.name.startswith("gemma") else "silu",
        qkv_bias="blk.0.attn_q.bias" in checkpoint or "blk.0.attn_qkv.bias" in checkpoint,
        o_bias="blk.0.attn_output.bias" in checkpoint,
        mlp_bias="blk.0.ffn_down.bias" in checkpoint,
        qk_norm=family.qk_norm,
        attention_scale=_attention_scale(family, settings, head_dim, hidden // heads, count),
        attention_softcap=_softcap(family, settings, "attn_logit_softcapping"),
        logits_softcap=_softcap(family, settings, "final_logit_softcapping"),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else settings.number("embedding_scale", 1.0),
        residual_scale=settings.number("residual_scale", 1.0),
        logits_scale=1.0 / settings.positive("logit_scale", 1.0),
        tie_word_embeddings="output.weight" not in checkpoint,
        eos_token_ids=_end_tokens(metadata),
        bos_token_id=(
            int(tokenizer.number("tokenizer.ggml.bos_token_id"))
            if tokenizer.has("tokenizer.ggml.bos_token_id")
            else None
        ),
    )


def _vocab_size(checkpoint: Checkpoint) -> int:
    shape = checkpoint.tensor("token_embd.weight").shape
    if len(shape) != 2:
        raise ModelFormatError(f"tensor 'token_embd.weight' has shape {list(shape)}; it must be [vocabulary, hidden]")
    return int(shape[0])


def _end_tokens(metadata: dict[str, Any]) -> tuple[int, ...]:
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in END_TOKENS]
    return tuple(dict.fromkeys(int(i) for i in ids if isinstance(i, int) and i >= 0))


def _attention_scale(family: Family, settings: Settings, head_dim: int, per_head: int, layers: int) -> float:
    if settings.has("attention.scale"):
        return settings.positive("attention.scale")
    return 1.0 / math.sqrt(per_head if WIDE_GEMMA.get(family.name) == layers else head_dim)


def _softcap(family: Family, settings: Settings, key: str) -> float | None:
    if not settings.has(key) and key in family.defaults:
        return float(family.defaults[key])
    return settings.maybe_number(key)


def _max_positions(settings: Settings) -> int:
    """As for config.json: yarn names the trained length apart, so there the product counts."""
    own = settings.size("context_length")
    if settings.values.get("rope.scaling.type") == "yarn" and settings.has("rope.scaling.factor"):
        original = settings.size("rope.scaling.original_context_length", own)
        return max(own, min(int(original * settings.positive("rope.scaling.factor")), MAX_SIZE - 1))
    return own


def _moe(settings: Settings) -> MoeConfig:
    return MoeConfig(
        num_experts=settings.size("expert_count"),
        num_experts_per_token=settings.size("expert_used_count"),
        intermediate_size=settings.size("expert_feed_forward_length", settings.size("feed_forward_length")),
        renormalize=True,
    )


def _layers(
    family: Family, settings: Settings, checkpoint: Checkpoint, head_dim: int, count: int, moe: MoeConfig | None
) -> tuple[LayerConfig, ...]:
    rope = _rope(settings, checkpoint, head_dim)
    local = RopeConfig(theta=settings.positive("rope.freq_base_swa", GEMMA_LOCAL_THETA), rotary_dim=rope.rotary_dim)
    window = int(settings.number("attention.sliding_window", 0)) or None
    if window is not None and window >= _max_positions(settings):
        window = None
    pattern = family.window_pattern
    if isinstance(settings.values.get("attention.sliding_window_pattern"), int):
        pattern = settings.size("attention.sliding_window_pattern")
    layers = []
    for i in range(count):
        slides = window is not None and (
            family.windows == "all" or (family.windows == "alternate" and (i + 1) % pattern)
        )
        nope = family.nope_interval is not None and (i + 1) % family.nope_interval == 0
        layers.append(
            LayerConfig(
                window=window if slides else None,
                rope=None if nope else local if slides and family.local_rope else rope,
                moe=moe if f"blk.{i}.ffn_gate_inp.weight" in checkpoint else None,
            )
        )
    return tuple(layers)


def _rope(settings: Settings, checkpoint: Checkpoint, head_dim: int) -> RopeConfig:
    given = settings.text("rope.scaling.type", "none")
    if given not in ROPE_SCALINGS:
        raise UnsupportedModelError(
            f"rope scaling {given!r} is not supported; supported are {', '.join(ROPE_SCALINGS)}"
        )
    short, long = (_factors(checkpoint, f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    kind = "longrope" if long is not None else ROPE_SCALINGS[given]
    if kind == "longrope" and (short is None or long is None):
        raise ModelFormatError("rope scaling longrope needs the tensors rope_factors_short and rope_factors_long")
    own = settings.size("context_length")
    original = settings.size("rope.scaling.original_context_length", own)
    factor = 1.0
    if kind in ("linear", "yarn"):
        factor = settings.positive("rope.scaling.factor")
    elif kind == "longrope":
        factor = own / original
    elif kind == "default" and settings.has("rope.scale_linear"):
        kind, factor = "linear", settings.positive("rope.scale_linear")
    attention_factor = settings.maybe_number("rope.scaling.attn_factor")
    if kind == "yarn" and attention_factor is not None:
        attention_factor *= 1.0 + 0.1 * math.log(max(factor, 1.0))  # llama.cpp's key multiplies yarn's own factor
    return RopeConfig(
        theta=settings.positive("rope.freq_base", 10_000.0),
        rotary_dim=settings.size("rope.dimension_count", head_dim),
        scaling=kind,
        factor=factor,
        original_max_position=original if kind in ("yarn", "longrope") else None,
        attention_factor=attention_factor,
        beta_fast=settings.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.positive("rope.scaling.yarn_beta_slow", 1.0),
        short_factor=short,
        long_factor=long,
        freq_factors=_factors(checkpoint, "rope_freqs.weight"),
    )


def _factors(checkpoint: Checkpoint, name: str) -> tuple[float, ...] | None:
    """A small tensor of factors as numbers; None where the file has none."""
    if name not in checkpoint:
        return None
    values = checkpoint.tensor(name).to_torch().flatten().tolist()
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelFormatError(f"tensor {name!r} holds factors that are not positive numbers")
    return tuple(values)
