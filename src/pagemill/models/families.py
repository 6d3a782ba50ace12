"""The model families, as data: what each architecture's configuration means and what its tensors are called.

Owns the table of families and the choice among them. models/hf_config.py and models/gguf_config.py read the two kinds
of configuration with it; models/loader.py finds tensors with it. Adding a family means adding an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.model_config import ModelConfig

if TYPE_CHECKING:
    from pagemill.models.checkpoint import Checkpoint

__all__ = ["FAMILIES", "Family", "family_of", "model_config"]

Names = Mapping[str, str]
"""Role -> template of the tensor's name without ``.weight``; {i} is the layer, {e} the expert.

Roles: embedding, final_norm, head; per layer attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q, k, v or qkv, o,
q_norm, k_norm, gate, up or gate_up, down, router, expert_gate, expert_up, expert_down. A template without {e} for an
expert's role is one tensor of all experts. An encoder has position, segment, embedding_norm, pooler and classifier too.
"""

_ATTENTION = {
    "q": "layers.{i}.self_attn.q_proj",
    "k": "layers.{i}.self_attn.k_proj",
    "v": "layers.{i}.self_attn.v_proj",
    "o": "layers.{i}.self_attn.o_proj",
}
_QK_NORM = {"q_norm": "layers.{i}.self_attn.q_norm", "k_norm": "layers.{i}.self_attn.k_norm"}
_MLP = {
    "gate": "layers.{i}.mlp.gate_proj",
    "up": "layers.{i}.mlp.up_proj",
    "down": "layers.{i}.mlp.down_proj",
}
_ENDS = {"embedding": "embed_tokens", "final_norm": "norm"}
_PRE_NORM = {"attn_norm": "layers.{i}.input_layernorm", "mlp_norm": "layers.{i}.post_attention_layernorm"}
_POST_NORM = {
    "attn_post_norm": "layers.{i}.post_attention_layernorm",
    "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}
_SANDWICH_NORM = {
    **_POST_NORM,
    "attn_norm": "layers.{i}.input_layernorm",
    "mlp_norm": "layers.{i}.pre_feedforward_layernorm",
}
_LLAMA = {**_ENDS, **_PRE_NORM, **_ATTENTION, **_MLP}

_BERT = {
    "embedding": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "segment": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
    "q": "encoder.layer.{i}.attention.self.query",
    "k": "encoder.layer.{i}.attention.self.key",
    "v": "encoder.layer.{i}.attention.self.value",
    "o": "encoder.layer.{i}.attention.output.dense",
    "attn_post_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "up": "encoder.layer.{i}.intermediate.dense",
    "down": "encoder.layer.{i}.output.dense",
    "mlp_post_norm": "encoder.layer.{i}.output.LayerNorm",
    "pooler": "pooler.dense",
    "classifier": "classifier",
}

GGUF_NAMES: Names = MappingProxyType(
    {
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "attn_norm": "blk.{i}.attn_norm",
        "attn_post_norm": "blk.{i}.post_attention_norm",
        "mlp_norm": "blk.{i}.ffn_norm",
        "mlp_post_norm": "blk.{i}.post_ffw_norm",
        "q": "blk.{i}.attn_q",
        "k": "blk.{i}.attn_k",
        "v": "blk.{i}.attn_v",
        "o": "blk.{i}.attn_output",
        "q_norm": "blk.{i}.attn_q_norm",
        "k_norm": "blk.{i}.attn_k_norm",
        "gate": "blk.{i}.ffn_gate",
        "up": "blk.{i}.ffn_up",
        "down": "blk.{i}.ffn_down",
        "router": "blk.{i}.ffn_gate_inp",
        "expert_gate": "blk.{i}.ffn_gate_exps",
        "expert_up": "blk.{i}.ffn_up_exps",
        "expert_down": "blk.{i}.ffn_down_exps",
    }
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. ``defaults`` stand in for what a config.json leaves out, as its configuration class does."""

    name: str
    hf: tuple[str, ...]
    """Names in config.json's ``architectures``."""
    names: Names
    """Of safetensors files, below the base model's prefix; ``head`` is lm_head everywhere."""
    gguf: str | None = None
    """llama.cpp's name of the architecture."""
    gguf_names: Names = field(default_factory=lambda: GGUF_NAMES)
    gguf_permuted: bool = False
    """llama.cpp's converter reorders q and k for interleaved rotary pairs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    """What a missing ``tie_word_embeddings`` means."""
    norm_placement: str = "pre"
    norm_offset: float = 0.0
    """Added to norm weights of safetensors files; GGUF files have it added already."""
    qk_norm: str | None = None
    biases: str = "none"
    """none; qkv: always on q, k and v; config: on q, k, v and o with attention_bias, on the MLP with mlp_bias."""
    windows: str = "none"
    """Which layers have a window: none, all, config (use_sliding_window and max_window_layers), switch (all with
    use_sliding_window), nope (those without rope), or alternate (all but every n-th)."""
    window_pattern: int = 1
    """For alternate: every n-th layer sees everything."""
    local_rope: bool = False
    """Layers with a window have a theta of their own and no scaling (Gemma 3)."""
    nope_interval: int | None = None
    """Every n-th layer has no position embedding unless the config lists them (SmolLM3)."""
    experts: str | None = None
    """None, mixtral or qwen: where the configuration keeps the experts' numbers."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other words for kinds of rope scaling."""
    encoder: bool = False
    """Every token sees every other; models/encoder.py in place of models/decoder.py."""
    positions_after_padding: bool = False
    """An encoder whose first token has the position after the padding token's id (RoBERTa)."""


_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}

_ALL = (
    Family(
        name="llama",
        hf=("LlamaForCausalLM",),
        names=_LLAMA,
        gguf="llama",
        gguf_permuted=True,
        biases="config",
    ),
    Family(
        name="smollm3",
        hf=("SmolLM3ForCausalLM",),
        names=_LLAMA,
        gguf="smollm3",
        gguf_permuted=True,
        defaults={"rope_theta": 2_000_000.0, "no_rope_layer_interval": 4},
        tied=True,
        biases="config",
        windows="nope",
        nope_interval=4,
    ),
    Family(
        name="mistral",
        hf=("MistralForCausalLM",),
        names=_LLAMA,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        windows="all",
    ),
    Family(
        name="mixtral",
        hf=("MixtralForCausalLM",),
        names={
            **_ENDS,
            **_PRE_NORM,
            **_ATTENTION,
            "router": "layers.{i}.block_sparse_moe.gate",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{e}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{e}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{e}.w2",
        },
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 8},
        windows="all",
        experts="mixtral",
    ),
    Family(
        name="qwen2",
        hf=("Qwen2ForCausalLM",),
        names=_LLAMA,
        gguf="qwen2",
        defaults={"sliding_window": 4096, "max_window_layers": 28},
        biases="qkv",
        windows="config",
    ),
    Family(
        name="qwen3",
        hf=("Qwen3ForCausalLM",),
        names={**_LLAMA, **_QK_NORM},
        gguf="qwen3",
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        biases="config",
        qk_norm="head",
        windows="config",
    ),
    Family(
        name="qwen3_moe",
        hf=("Qwen3MoeForCausalLM",),
        names={
            **_LLAMA,
            **_QK_NORM,
            "router": "layers.{i}.mlp.gate",
            "expert_gate": "layers.{i}.mlp.experts.{e}.gate_proj",
            "expert_up": "layers.{i}.mlp.experts.{e}.up_proj",
            "expert_down": "layers.{i}.mlp.experts.{e}.down_proj",
        },
        gguf="qwen3moe",
        defaults={"sliding_window": 4096, "norm_topk_prob": False, "decoder_sparse_step": 1},
        biases="config",
        qk_norm="head",
        windows="switch",
        experts="qwen",
    ),
    Family(
        name="phi3",
        hf=("Phi3ForCausalLM",),
        names={
            **_ENDS,
            **_PRE_NORM,
            "qkv": "layers.{i}.self_attn.qkv_proj",
            "o": "layers.{i}.self_attn.o_proj",
            "gate_up": "layers.{i}.mlp.gate_up_proj",
            "down": "layers.{i}.mlp.down_proj",
        },
        gguf="phi3",
        gguf_names={
            **{role: name for role, name in GGUF_NAMES.items() if role not in ("q", "k", "v", "gate", "up")},
            "qkv": "blk.{i}.attn_qkv",
            "gate_up": "blk.{i}.ffn_up",
        },
        defaults={"original_max_position_embeddings": 4096},
        windows="all",
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    Family(
        name="gemma2",
        hf=("Gemma2ForCausalLM",),
        names={**_ENDS, **_SANDWICH_NORM, **_ATTENTION, **_MLP},
        gguf="gemma2",
        defaults={**_GEMMA_DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        tied=True,
        norm_placement="sandwich",
        norm_offset=1.0,
        biases="config",
        windows="alternate",
        window_pattern=2,
        scaled_embedding=True,
    ),
    Family(
        name="gemma3",
        hf=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        names={**_ENDS, **_SANDWICH_NORM, **_ATTENTION, **_MLP, **_QK_NORM},
        gguf="gemma3",
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        tied=True,
        norm_placement="sandwich",
        norm_offset=1.0,
        biases="config",
        qk_norm="head",
        windows="alternate",
        window_pattern=6,
        local_rope=True,
        scaled_embedding=True,
    ),
    Family(
        name="olmo2",
        hf=("Olmo2ForCausalLM",),
        names={**_ENDS, **_POST_NORM, **_ATTENTION, **_MLP, **_QK_NORM},
        gguf="olmo2",
        norm_placement="post",
        biases="config",
        qk_norm="full",
    ),
    Family(
        name="granite",
        hf=("GraniteForCausalLM",),
        names=_LLAMA,
        gguf="granite",
        gguf_permuted=True,
        defaults={"attention_multiplier": 1.0},
        biases="config",
    ),
    Family(
        name="bert",
        hf=("BertModel", "BertForSequenceClassification", "BertForMaskedLM"),
        names=_BERT,
        defaults={"hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12},
        encoder=True,
    ),
    Family(
        name="roberta",
        hf=(
            *("RobertaModel", "RobertaForSequenceClassification"),
            *("XLMRobertaModel", "XLMRobertaForSequenceClassification"),
        ),
        names={**_BERT, "pooler": "classifier.dense", "classifier": "classifier.out_proj"},
        defaults={"hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 1},
        encoder=True,
        positions_after_padding=True,
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})


def family_of(checkpoint: Checkpoint) -> Family:
    """The family a checkpoint belongs to; :class:`UnsupportedModelError` lists those that exist."""
    if checkpoint.format == "gguf":
        given = checkpoint.config.get("general.architecture")
        found = [family for family in _ALL if family.gguf is not None and family.gguf == given]
        known = sorted(family.gguf for family in _ALL if family.gguf)
    else:
        architectures = checkpoint.config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise ModelFormatError("config.json has no 'architectures'; it must name one, such as LlamaForCausalLM")
        given = architectures[0]
        headless = (
            f"{str(given).removesuffix('Model')}ForCausalLM"  # an embedding model is often saved without its head
        )
        found = [family for family in _ALL if given in family.hf or headless in family.hf]
        known = sorted(name for family in _ALL for name in family.hf)
    if not found:
        raise UnsupportedModelError(f"architecture {given!r} is not supported; supported are {', '.join(known)}")
    return found[0]


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """What a checkpoint's own configuration says, in Pagemill's words.

    Raises :class:`ModelFormatError` for values that are missing or make no sense, and
    :class:`UnsupportedModelError` for an architecture or a feature that would change results and is not implemented.
    """
    from pagemill.models.gguf_config import from_metadata
    from pagemill.models.hf_config import encoder_config, from_config_json

    family = family_of(checkpoint)
    if checkpoint.format == "gguf":
        config = from_metadata(family, checkpoint)
    elif family.encoder:
        config = encoder_config(family, checkpoint.config)
    else:
        config = from_config_json(family, checkpoint.config, checkpoint.generation_config)
    _check(config)
    return config


def _check(config: ModelConfig) -> None:
    """Numbers that must fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFormatError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads")
    for i, layer in enumerate(config.layers):
        if layer.rope and (layer.rope.rotary_dim % 2 or not 2 <= layer.rope.rotary_dim <= config.head_dim):
            raise ModelFormatError(
                f"layer {i}: rotary dimension {layer.rope.rotary_dim} must be even and at most {config.head_dim}"
            )
        if layer.moe and layer.moe.num_experts_per_token > layer.moe.num_experts:
            raise ModelFormatError(
                f"layer {i}: {layer.moe.num_experts_per_token} experts per token of {layer.moe.num_experts} experts"
            )
