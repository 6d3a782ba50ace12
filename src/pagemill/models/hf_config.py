"""config.json (old and new spellings) -> ModelConfig.

Owns what transformers' configuration keys mean. Features that would change results and are not implemented are
refused by name; keys that do not change a forward pass are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.layers.rotary import SCALINGS
from pagemill.model_config import LayerConfig, ModelConfig, MoeConfig, RopeConfig
from pagemill.models.families import Family
from pagemill.models.settings import MAX_LAYERS, MAX_SIZE, Settings

__all__ = ["encoder_config", "from_config_json"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def from_config_json(family: Family, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The model that ``config`` describes; raises ModelFormatError or UnsupportedModelError."""
    _refuse(config)
    tied = _first_bool(config, "tie_word_embeddings")
    inner = config.get("text_config")
    if inner is not None:
        if not isinstance(inner, Mapping):
            raise ModelFormatError("config.json: text_config must be an object")
        _refuse(inner)
        nested_tied = _first_bool(inner, "tie_word_embeddings")
        tied = tied if tied is not None else nested_tied
    text: Mapping[str, Any] = inner if inner is not None else config
    merged = {**family.defaults, **{key: value for key, value in text.items() if value is not None}}
    # an explicit null switches a default off (Mistral's sliding_window, Gemma 2's soft caps)
    merged.update({key: None for key in family.defaults if key in text and text[key] is None})
    settings = Settings(merged, "config.json")
    hidden = settings.size("hidden_size")
    heads = settings.size("num_attention_heads")
    head_dim = settings.size("head_dim", hidden // heads)
    attention_bias = family.biases == "config" and settings.flag("attention_bias")
    return ModelConfig(
        architecture=family.name,
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=settings.size("num_key_value_heads", heads),
        head_dim=head_dim,
        layers=_layers(family, settings, head_dim),
        max_position_embeddings=_max_positions(family, settings),
        norm_eps=settings.positive("rms_norm_eps", 1e-6),
        norm_weight_offset=family.norm_offset,
        norm_placement=family.norm_placement,
        hidden_act=_activation(settings),
        qkv_bias=family.biases == "qkv" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.biases == "config" and settings.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        attention_scale=_attention_scale(settings, head_dim),
        attention_softcap=settings.maybe_number("attn_logit_softcapping"),
        logits_softcap=settings.maybe_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(hidden) if family.scaled_embedding else settings.number("embedding_multiplier", 1.0),
        residual_scale=settings.number("residual_multiplier", 1.0),
        logits_scale=1.0 / settings.positive("logits_scaling", 1.0),
        tie_word_embeddings=family.tied if tied is None else tied,
        eos_token_ids=_token_ids(generation.get("eos_token_id"), config.get("eos_token_id"), text.get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(text.get("bos_token_id"), config.get("bos_token_id"))), None),
    )


def encoder_config(family: Family, config: Mapping[str, Any]) -> ModelConfig:
    """The encoder that ``config`` describes; raises ModelFormatError or UnsupportedModelError."""
    _refuse(config)
    settings = Settings({**family.defaults, **{k: v for k, v in config.items() if v is not None}}, "config.json")
    kind = settings.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UnsupportedModelError(f"position_embedding_type={kind!r} is not supported; only absolute is")
    if settings.text("hidden_act") != "gelu":
        raise UnsupportedModelError(f"hidden_act={settings.text('hidden_act')!r} is not supported; only gelu is")
    offset = int(settings.number("pad_token_id")) + 1 if family.positions_after_padding else 0
    positions = settings.size("max_position_embeddings") - offset
    if positions < 1 or offset < 0:
        raise ModelFormatError(f"config.json: no position is left of {positions + offset} after {offset} for padding")
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    if hidden % heads:
        raise ModelFormatError(f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
    return ModelConfig(
        architecture=family.name,
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        layers=(LayerConfig(rope=None),) * settings.size("num_hidden_layers", most=MAX_LAYERS),
        max_position_embeddings=positions,
        position_offset=offset,
        norm_eps=settings.positive("layer_norm_eps"),
        norm_placement="post",
        hidden_act="gelu",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=1.0 / math.sqrt(hidden // heads),
        causal=False,
        type_vocab_size=settings.size("type_vocab_size"),
    )


def _refuse(config: Mapping[str, Any]) -> None:
    """Features that change results and are not implemented."""
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedModelError(
            f"quantization_config {method!r} is not supported; use the unquantised checkpoint, or a GGUF file of it"
        )
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention=true is not supported; only causal models are")


def _first_bool(config: Mapping[str, Any], key: str) -> bool | None:
    return Settings(config, "config.json").flag(key) if config.get(key) is not None else None


def _activation(settings: Settings) -> str:
    key = "hidden_activation" if settings.has("hidden_activation") else "hidden_act"
    given = settings.text(key, "silu")
    if given not in ACTIVATIONS:
        raise UnsupportedModelError(f"{key}={given!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]


def _attention_scale(settings: Settings, head_dim: int) -> float:
    if settings.has("attention_multiplier"):
        return settings.number("attention_multiplier")
    return 1.0 / math.sqrt(settings.positive("query_pre_attn_scalar", float(head_dim)))


def _token_ids(*candidates: Any) -> tuple[int, ...]:
    """All ids named, each once, in order of appearance; each candidate is an id, a list of ids or None."""
    found: dict[int, None] = {}
    for candidate in candidates:
        for item in candidate if isinstance(candidate, list) else [candidate]:
            if isinstance(item, int) and not isinstance(item, bool):
                found[item] = None
    return tuple(found)


def _max_positions(family: Family, settings: Settings) -> int:
    """The config's own number is never multiplied; yarn names the trained length apart, so there the product counts."""
    own = settings.size("max_position_embeddings")
    scaling = _rope_parameters(settings, "full_attention")
    if _rope_type(family, scaling) == "yarn" and scaling.has("factor"):
        original = scaling.size("original_max_position_embeddings", own)
        return max(own, min(int(original * scaling.positive("factor")), MAX_SIZE - 1))
    return own


def _layers(family: Family, settings: Settings, head_dim: int) -> tuple[LayerConfig, ...]:
    count = settings.size("num_hidden_layers", most=MAX_LAYERS)
    with_rope = _with_rope(family, settings, count)
    windows = _windows(family, settings, count, with_rope)
    ropes = {kind: _rope(family, settings, head_dim, kind) for kind in LAYER_TYPES}
    return tuple(
        LayerConfig(
            window=windows[i],
            rope=ropes[LAYER_TYPES[windows[i] is not None]] if with_rope[i] else None,
            moe=_moe(family, settings, i),
        )
        for i in range(count)
    )


def _with_rope(family: Family, settings: Settings, count: int) -> list[bool]:
    if family.nope_interval is None:
        return [True] * count
    listed = settings.numbers("no_rope_layers")
    if listed:
        if len(listed) < count:
            raise ModelFormatError(f"config.json: no_rope_layers has {len(listed)} entries for {count} layers")
        return [bool(entry) for entry in listed[:count]]
    interval = settings.size("no_rope_layer_interval", family.nope_interval)
    return [(i + 1) % interval != 0 for i in range(count)]


def _windows(family: Family, settings: Settings, count: int, with_rope: list[bool]) -> list[int | None]:
    """Per layer: the window, or None where it would cover every position anyway."""
    rule = family.windows
    off = rule in ("config", "switch", "nope") and not settings.flag("use_sliding_window")
    if rule == "none" or off or not settings.has("sliding_window"):
        return [None] * count
    window = settings.size("sliding_window")
    if window >= _max_positions(family, settings):
        return [None] * count
    types = settings.values.get("layer_types")
    if types is not None and rule not in ("all", "switch"):
        return [window if kind == "sliding_attention" else None for kind in _layer_types(types, count)]
    match rule:
        case "config":
            slides = [i >= settings.number("max_window_layers") for i in range(count)]
        case "nope":
            slides = [not rope for rope in with_rope]
        case "alternate":
            pattern = settings.size("sliding_window_pattern", family.window_pattern)
            slides = [(i + 1) % pattern != 0 for i in range(count)]
        case _:
            slides = [True] * count
    return [window if slide else None for slide in slides]


def _layer_types(types: Any, count: int) -> list[str]:
    if not isinstance(types, list) or len(types) != count:
        raise ModelFormatError(f"config.json: layer_types must list {count} layers")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(f"layer type {kind!r} is not supported; supported are {', '.join(LAYER_TYPES)}")
    return types


def _moe(family: Family, settings: Settings, layer: int) -> MoeConfig | None:
    if family.experts == "mixtral":
        return MoeConfig(
            num_experts=settings.size("num_local_experts"),
            num_experts_per_token=settings.size("num_experts_per_tok"),
            intermediate_size=settings.size("intermediate_size"),
            renormalize=True,
        )
    if family.experts == "qwen":
        dense = settings.numbers("mlp_only_layers") or ()
        if layer in dense or (layer + 1) % settings.size("decoder_sparse_step"):
            return None
        key = "num_experts" if settings.has("num_experts") else "num_local_experts"
        return MoeConfig(
            num_experts=settings.size(key),
            num_experts_per_token=settings.size("num_experts_per_tok"),
            intermediate_size=settings.size("moe_intermediate_size"),
            renormalize=settings.flag("norm_topk_prob"),
        )
    return None


def _rope_parameters(settings: Settings, kind: str) -> Settings:
    """``rope_scaling`` or ``rope_parameters``, whichever is there; where nested, the part for this kind of layer."""
    given = settings.values.get("rope_scaling") or settings.values.get("rope_parameters") or {}
    if isinstance(given, Mapping) and any(key in given for key in LAYER_TYPES):
        given = given.get(kind) or {}
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"config.json: rope scaling must be an object, not {given!r}")
    return Settings(given, "config.json rope scaling")


def _rope_type(family: Family, scaling: Settings) -> str:
    given = scaling.text("rope_type" if scaling.has("rope_type") else "type", "default")
    kind = family.rope_aliases.get(given, given)
    if kind not in SCALINGS:
        raise UnsupportedModelError(f"rope scaling {given!r} is not supported; supported are {', '.join(SCALINGS)}")
    return kind


def _rope(family: Family, settings: Settings, head_dim: int, layer_type: str) -> RopeConfig:
    scaling = _rope_parameters(settings, layer_type)
    parameters = settings.values.get("rope_parameters")
    nested = isinstance(parameters, Mapping) and layer_type in parameters
    local = family.local_rope and layer_type == "sliding_attention"
    if local and not nested:
        scaling = Settings({}, scaling.where)
    theta = scaling.positive("rope_theta", settings.positive("rope_local_base_freq" if local else "rope_theta", 1e4))
    unknown = sorted(set(scaling.values) - ROPE_KEYS)
    if unknown:
        raise UnsupportedModelError(f"rope scaling setting {unknown[0]!r} is not supported")
    kind = _rope_type(family, scaling)
    partial = scaling.positive("partial_rotary_factor", settings.positive("partial_rotary_factor", 1.0))
    own = settings.size("max_position_embeddings")
    original = None
    if kind in ("llama3", "yarn", "longrope"):
        inner = scaling.size("original_max_position_embeddings", own)
        original = settings.size("original_max_position_embeddings", inner)
    return RopeConfig(
        theta=theta,
        rotary_dim=int(head_dim * partial),
        scaling=kind,
        factor=_factor(kind, scaling, own, original),
        original_max_position=original,
        low_freq_factor=scaling.positive("low_freq_factor", 1.0),
        high_freq_factor=scaling.positive("high_freq_factor", 4.0),
        beta_fast=scaling.positive("beta_fast", 32.0),
        beta_slow=scaling.positive("beta_slow", 1.0),
        attention_factor=scaling.maybe_number("attention_factor"),
        mscale=scaling.maybe_number("mscale"),
        mscale_all_dim=scaling.maybe_number("mscale_all_dim"),
        truncate=scaling.flag("truncate", True),
        long_factor=_needed_factors(kind, scaling, "long_factor"),
        short_factor=_needed_factors(kind, scaling, "short_factor"),
    )


def _factor(kind: str, scaling: Settings, own: int, original: int | None) -> float:
    if kind == "default":
        return 1.0
    if kind in ("yarn", "longrope"):
        assert original is not None
        return scaling.positive("factor", own / original)
    return scaling.positive("factor")


def _needed_factors(kind: str, scaling: Settings, key: str) -> tuple[float, ...] | None:
    if kind != "longrope":
        return None
    values = scaling.numbers(key)
    if values is None:
        raise ModelFormatError(f"config.json: rope scaling longrope needs {key}")
    return values
