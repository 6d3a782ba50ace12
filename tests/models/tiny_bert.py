"""Tiny random encoders for tests: BERT's layout in a few hundred kilobytes, with a WordPiece tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["VOCABULARY", "sentence_transformer", "tiny_bert", "tiny_cross_encoder"]

VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *"abcdefghijklmnopqrstuvwxyz.,?",
    *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
    *("the", "quick", "brown", "fox", "jump", "##s", "over", "lazy", "dog", "is", "it", "##ing", "##ed", "what"),
]
BASE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def tiny_bert(path: Path, *, kind: str = "BertModel", dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a random encoder with its vocab.txt under ``path`` and return it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    architecture = getattr(transformers, kind)
    model = architecture(architecture.config_class(**{**BASE, **overrides}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.3)
            elif "LayerNorm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
            elif "embeddings" in name:
                weight.normal_(0.0, 0.7)
            else:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}))
    return path


def tiny_cross_encoder(path: Path, **overrides: Any) -> Path:
    """One that scores pairs of texts."""
    return tiny_bert(path, kind="BertForSequenceClassification", **{"num_labels": 1, **overrides})


def sentence_transformer(path: Path, *, mode: str, normalize: bool = True, max_seq_length: int | None = None) -> Path:
    """Make a model's folder one of sentence-transformers, pooled by ``mode``."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, place) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    settings = {f"pooling_mode_{name}": name == mode for name in modes}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if max_seq_length is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    return path
