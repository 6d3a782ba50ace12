"""Tiny random checkpoints of every family, made by transformers: the reference that the models are checked against.

Weights are drawn wide enough that logits differ clearly from token to token, norm weights and biases are not at their
initial 1 and 0 (a forgotten offset or bias must show), and every checkpoint carries a tokenizer, so an engine or a
server can run on it. Sizes put windows (8) and rope-scaling borders (16) within reach of short prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["FAMILIES", "VOCAB_SIZE", "tiny_checkpoint", "tiny_llama", "tiny_tokenizer"]

VOCAB_SIZE = 320
BOS, EOS, IM_START, IM_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW = 8
ORIGINAL_MAX_POSITION = 16
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_MAX_POSITION,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_MAX_POSITION,
}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "hidden_activation": "gelu_pytorch_tanh",
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_raw": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL_MAX_POSITION},
    ),
    "phi3_window": ("Phi3", {"sliding_window": WINDOW, "original_max_position_embeddings": 128}),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
}
"""Name -> (class prefix in transformers, what differs from BASE)."""


def tiny_checkpoint(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of ``family`` (a key of FAMILIES) with its tokenizer under ``path`` and return it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    prefix, changes = FAMILIES[family]
    options = {**BASE, **changes, **overrides}
    config = getattr(transformers, f"{prefix}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, 0.3 if config.tie_word_embeddings else 1.0)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    _save_tokenizer(path)
    return path


def tiny_llama(path: Path, **overrides: Any) -> Path:
    """The smallest and quickest of all: two layers of Llama."""
    return tiny_checkpoint("llama", path, **{"num_hidden_layers": 2, **overrides})


def _fill(name: str, weight: torch.Tensor, embedding_std: float) -> None:
    if name.endswith("bias"):
        weight.normal_(0.0, 0.5)
    elif "norm" in name:
        weight.add_(torch.randn_like(weight) * 0.3)
    elif "embed" in name:
        weight.normal_(0.0, embedding_std)
    else:
        weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)


def tiny_tokenizer() -> Any:
    """A byte-level BPE with all 256 bytes, a few merges and four special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=["<pad>", BOS, EOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "the quick brown fox jumps over the lazy dog and then the other one of them in a while that is there for her"
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
    )
    return tokenizer


def _save_tokenizer(path: Path) -> None:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": "<pad>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
