"""Checkpoints that are measured and cannot be fetched: another model's shape filled with noise, and other widths.

Owns what is written below benchmarks/peers/build. The vocabulary is that of a small GGUF file which is at hand. Nothing
here says anything: speed depends on shapes alone, and ``widened`` computes what the original computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

__all__ = ["QWEN3_0_6B", "noise_folder", "noise_gguf", "widened"]

BF16 = gguf.GGMLQuantizationType.BF16

QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_sliding_window": False,
}
"""The shape of Qwen/Qwen3-0.6B (its config.json), with the token ids of the vocabulary that is used instead."""

MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
VECTORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def _noise(config: dict[str, Any], known_tokens: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every tensor: its name in safetensors, its name in GGUF, bfloat16 values that the seed decides."""
    generator = torch.Generator().manual_seed(0)
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    lengths = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    lengths |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

    embedding = matrix(config["vocab_size"], hidden)
    embedding[known_tokens:] = 0  # never the likeliest, so that only ids with a text are produced
    yield "model.embed_tokens.weight", "token_embd.weight", embedding
    for i in range(config["num_hidden_layers"]):
        for name, short in MATRICES.items():
            yield f"model.layers.{i}.{name}.weight", f"blk.{i}.{short}.weight", matrix(*shapes[name])
        for name, short in VECTORS.items():
            yield f"model.layers.{i}.{name}.weight", f"blk.{i}.{short}.weight", torch.ones(lengths[name]).bfloat16()
    yield "model.norm.weight", "output_norm.weight", torch.ones(hidden).bfloat16()


def noise_folder(config: dict[str, Any], tokenizer: Path, folder: Path) -> Path:
    """A safetensors folder of ``config`` filled with noise, with the tokenizer of the folder ``tokenizer``."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        known = _known_tokens(tokenizer)
        save_file({name: tensor for name, _, tensor in _noise(config, known)}, folder / "model.safetensors")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / name, folder / name)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _known_tokens(tokenizer: Path) -> int:
    return len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])


def noise_gguf(config: dict[str, Any], vocabulary: Path, target: Path) -> Path:
    """The same tensors as a BF16 GGUF file, with the tokenizer of ``vocabulary`` made as long as needed."""
    if target.exists():
        return target
    source = gguf.GGUFReader(vocabulary)
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(target.with_suffix(".part"), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    known = len(source.fields["tokenizer.ggml.tokens"].contents())
    fill = {
        "tokenizer.ggml.tokens": [f"<unused{i}>" for i in range(known, config["vocab_size"])],
        "tokenizer.ggml.token_type": [int(gguf.TokenType.UNUSED)] * (config["vocab_size"] - known),
    }
    _copy_metadata(source, writer, "tokenizer.", fill)
    for _, name, tensor in _noise(config, known):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=BF16)
    return _finish(writer, target)


def _copy_metadata(
    source: gguf.GGUFReader, writer: gguf.GGUFWriter, prefix: str, changes: dict[str, Any], *, replace: bool = False
) -> None:
    """Keys that begin with ``prefix``; lists in ``changes`` are appended, or values replaced."""
    for name, field in source.fields.items():
        if not name.startswith(prefix) or name == "general.architecture":
            continue
        value = field.contents()
        if name in changes:
            value = changes[name] if replace else value + changes[name]
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)


def _finish(writer: gguf.GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)
    return target


def widened(original: Path, target: Path, heads: int) -> Path:
    """A ``llama`` BF16 GGUF file with ``heads`` heads of the same size, the new ones and the new columns zero.

    It computes what the original does: norms divide by the new width, so their weights and epsilon take the quotient of
    the widths. K quants need rows of whole 256; SmolLM2-135M's 9 heads of 64 make 576, 12 make 768.
    """
    if target.exists():
        return target
    source = gguf.GGUFReader(original)
    old_heads = source.fields["llama.attention.head_count"].contents()
    keys = source.fields["llama.attention.head_count_kv"].contents()
    old = source.fields["llama.embedding_length"].contents()
    dim = old // old_heads
    new, new_keys = heads * dim, heads * keys // old_heads
    epsilon = source.fields["llama.attention.layer_norm_rms_epsilon"].contents()
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "llama")
    changes = {
        "llama.embedding_length": new,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": new_keys,
        "llama.attention.layer_norm_rms_epsilon": epsilon * old / new,
    }
    _copy_metadata(source, writer, "general.", {})
    _copy_metadata(source, writer, "llama.", changes, replace=True)
    _copy_metadata(source, writer, "tokenizer.", {})
    sizes = {old: new, keys * dim: new_keys * dim}
    for tensor in source.tensors:
        if tensor.tensor_type == BF16:
            words = tensor.data.reshape(tensor.shape[1], -1).view(np.uint16)
            vocabulary = tensor.name in {"token_embd.weight", "output.weight"}
            rows = len(words) if vocabulary else sizes.get(len(words), len(words))
            columns = sizes.get(words.shape[1], words.shape[1])
            padded: npt.NDArray[np.uint16] = np.zeros((rows, columns), np.uint16)
            padded[: len(words), : words.shape[1]] = words
            writer.add_tensor(tensor.name, padded.view(np.uint8), raw_dtype=BF16)
        else:
            norm = np.zeros(new, np.float32)
            norm[:old] = tensor.data * np.sqrt(old / new)
            writer.add_tensor(tensor.name, norm)
    return _finish(writer, target)
