"""Configuration files with values of every wrong kind: each is read, or refused with one of our errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill.config import EngineConfig
from pagemill.engine.text import ModelText
from pagemill.errors import ModelError, RequestError
from pagemill.models.checkpoint import Checkpoint, open_checkpoint
from pagemill.models.families import model_config
from pagemill.models.sources import ModelSource
from pagemill.models.tokenizer import load_tokenizer
from tests.models.tiny import BASE, FAMILIES, tiny_llama
from tests.models.to_gguf import to_gguf

HUGE = 10**400
ODD: list[Any] = [
    *(None, True, False, "", "x", "\ud800", [], [1], [None], {}, {"a": 1}, [[1]], [{}]),
    *(0, -1, 1, 3, 1.5, -0.5, 1e308, 5e-324, 2**31, 2**63, HUGE, -HUGE, float("nan"), float("inf")),
]
ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 320,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 1,
    "position_embedding_type": "absolute",
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {**BASE, **changes, "architectures": [f"{prefix.removesuffix('Text')}ForCausalLM"]}
    for name, (prefix, changes) in FAMILIES.items()
} | {
    "bert": ENCODER | {"architectures": ["BertModel"]},
    "roberta": ENCODER | {"architectures": ["XLMRobertaForSequenceClassification"], "num_labels": 1},
    "of images, too": {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**BASE, "head_dim": 16}},
}
MAY_BE_THERE = (
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "layer_types", "no_rope_layers", "no_rope_layer_interval", "head_dim", "hidden_act"),
    *("mlp_only_layers", "decoder_sparse_step", "text_config", "quantization_config", "tie_word_embeddings"),
    *("query_pre_attn_scalar", "attention_multiplier", "original_max_position_embeddings", "rope_theta"),
)


MOST_PARTS = 8
"""Of an object or a list: vocabularies are long."""


def changed(value: Any) -> Iterator[Any]:
    """``value`` with each of its parts, at any depth, replaced by each odd value in turn."""
    yield from ODD
    if isinstance(value, dict):
        for key, part in list(value.items())[:MOST_PARTS]:
            for other in changed(part):
                yield {**value, key: other}
            yield {name: kept for name, kept in value.items() if name != key}
    elif isinstance(value, list):
        for index, part in enumerate(value[:MOST_PARTS]):
            for other in changed(part):
                yield [*value[:index], other, *value[index + 1 :]]


@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_config_json_holds_it_is_read_or_refused(name: str, tmp_path: Path) -> None:
    whole = dict.fromkeys(MAY_BE_THERE) | CONFIGS[name]
    source = ModelSource(name=name, path=tmp_path, format="safetensors")
    for config in changed(whole):
        if isinstance(config, dict):
            with contextlib.suppress(ModelError):
                model_config(Checkpoint(source, [], config=config))


FILES: dict[str, Any] = {
    "generation_config.json": {"eos_token_id": [2], "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.5},
    "tokenizer_config.json": {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    },
    "special_tokens_map.json": {"bos_token": "<s>", "unk_token": {"content": "</s>"}},
    "chat_template.json": {"chat_template": "{{ messages }}"},
    "tokenizer.json": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("odd") / "model")


@pytest.mark.parametrize("name", FILES)
def test_whatever_a_tokenizers_files_hold_they_are_read_or_refused(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "0")  # writing them takes longer than all the rest
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(folder / file)
    whole = json.loads((folder / name).read_text()) if FILES[name] is None else FILES[name]
    (tmp_path / name).unlink(missing_ok=True)
    source = ModelSource(name="odd", path=tmp_path, format="safetensors")
    for value in changed(whole):
        (tmp_path / name).write_text(json.dumps(value))
        with contextlib.suppress(ModelError, RequestError):
            text = ModelText.open(source, EngineConfig())
            text.default_params()
            text.tokenizer.encode("a b")
            text.tokenizer.token_bytes(5)


def test_whatever_a_gguf_file_says_of_itself_it_is_read_or_refused(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "model.gguf"
    to_gguf(json.loads((folder / "config.json").read_text()), folder, path)
    checkpoint = open_checkpoint(ModelSource(name="odd", path=path, format="gguf"))
    for key, value in list(checkpoint.config.items()):
        for other in changed(value):
            checkpoint.config[key] = other
            with contextlib.suppress(ModelError):
                model_config(checkpoint)
            if key.startswith("tokenizer"):
                with contextlib.suppress(ModelError, RequestError):
                    load_tokenizer(checkpoint).encode("a b")
        checkpoint.config[key] = value
