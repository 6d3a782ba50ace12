"""Tiny safetensors checkpoints as GGUF files, the way llama.cpp's converter writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

__all__ = ["ARCHITECTURES", "to_gguf"]

ARCHITECTURES = {
    "llama": "llama",
    "smollm3": "smollm3",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "granite": "granite",
}
"""model_type -> llama.cpp's architecture."""
PERMUTED = ("llama", "smollm3", "granite")
RENAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.", "blk."),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.gate.", "ffn_gate_inp."),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("input_layernorm", "attn_norm"),
]
EXPERT_ROLES = {
    "w1": "ffn_gate_exps",
    "w2": "ffn_down_exps",
    "w3": "ffn_up_exps",
    "gate_proj": "ffn_gate_exps",
    "down_proj": "ffn_down_exps",
    "up_proj": "ffn_up_exps",
}


def to_gguf(
    config: dict[str, Any],
    folder: Path,
    path: Path,
    *,
    kind: Callable[[str], gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write the checkpoint in ``folder`` to ``path``; ``kind`` chooses the type of each matrix (default F32)."""
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, arch, config)
    for name, tensor in _tensors(arch, config, load_file(folder / "model.safetensors")):
        data = tensor.float().numpy()
        if kind is None or data.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(data))
        else:
            packed = gguf.quants.quantize(data, kind(name))
            writer.add_tensor(name, packed, raw_shape=packed.shape, raw_dtype=kind(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_eos_token_id(2)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        ratio = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(ratio) / math.log(rope["original_max_position_embeddings"]))
        )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _tensors(arch: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    experts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in sorted(tensors.items()):
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            number, role, _ = tail.split(".")
            layer = head.split(".")[2]
            experts.setdefault(f"blk.{layer}.{EXPERT_ROLES[role]}.weight", []).append((int(number), tensor))
            continue
        if arch in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            tensor = _interleave(tensor, heads)
        if arch.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        yield _rename(arch, name), tensor
    for name, parts in experts.items():
        yield name, torch.stack([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, rope)


def _rename(arch: str, name: str) -> str:
    after_attention = "post_attention_norm" if arch in ("gemma2", "gemma3", "olmo2") else "ffn_norm"
    for old, new in [*RENAMES, ("post_attention_layernorm", after_attention)]:
        name = name.replace(old, new)
    return name


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (first half, second half) to pairs."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> torch.Tensor:
    """What each inverse frequency is divided by, one dimension after another."""
    head_dim = config["head_dim"]
    low_wavelength = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wavelength = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)
