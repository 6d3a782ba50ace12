"""A GGUF file of a model gives what its safetensors checkpoint gives: permuted heads, added offsets, factor tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pagemill.config import EngineConfig
from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.decoder import Decoder
from pagemill.models.families import model_config
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from tests.models.paged import logits_of
from tests.models.test_decoder import prompt
from tests.models.tiny import ORIGINAL_MAX_POSITION, tiny_checkpoint
from tests.models.to_gguf import to_gguf

Q = gguf.GGMLQuantizationType
CONVERTIBLE = [
    "llama",
    "llama3",
    "llama_bias",
    "llama_linear",
    "smollm3",
    "mixtral",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
]


def load(path: Path, **options: Any) -> Decoder:
    return load_model(open_checkpoint(resolve_source(str(path))), EngineConfig(**options), native=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def pair(family: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint and its conversion."""
    path = folder / family
    overrides = {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}  # GGUF implies head_dim
    if not path.exists():
        tiny_checkpoint(family, path, **overrides)
    config = json.loads((path / "config.json").read_text())
    name = "-".join([family, *options]) + ".gguf"
    return path, to_gguf(config, path, folder / name, **options)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", CONVERTIBLE)
def test_a_gguf_file_computes_what_its_safetensors_checkpoint_does(family: str, folder: Path) -> None:
    path, converted = pair(family, folder)
    for length in (ORIGINAL_MAX_POSITION, 40):
        longest = ORIGINAL_MAX_POSITION if length <= ORIGINAL_MAX_POSITION else 128
        expected = logits_of(load(path, max_model_len=longest), prompt(length))
        got = logits_of(load(converted, max_model_len=longest), prompt(length), chunk=7)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_blocks_kept_as_they_are_compute_what_their_float32_values_do(kind: Q, folder: Path, tmp_path: Path) -> None:
    path = folder / "quantised"
    if not path.exists():
        tiny_checkpoint("llama3", path)
    config = json.loads((path / "config.json").read_text())
    mixed = {"attn_v": Q.Q8_0}  # as in files that keep some matrices wider

    def choose(name: str) -> Q:
        return next((other for part, other in mixed.items() if part in name), kind)

    converted = to_gguf(config, path, tmp_path / "q.gguf", kind=choose)
    kept, widened = load(converted), load(converted, dtype="float32")
    assert kept.weight_bytes < 0.4 * widened.weight_bytes + kept.attention_specs[0].rope_table.nbytes
    torch.testing.assert_close(logits_of(kept, prompt(30)), logits_of(widened, prompt(30)), atol=1e-4, rtol=0)


def test_experts_of_one_tensor_stay_quantised(folder: Path, tmp_path: Path) -> None:
    path = tiny_checkpoint("mixtral", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    converted = to_gguf(config, path, tmp_path / "q.gguf", kind=lambda name: Q.Q8_0)
    got = logits_of(load(converted), prompt(20))
    torch.testing.assert_close(got, logits_of(load(converted, dtype="float32"), prompt(20)), atol=1e-4, rtol=0)


def write_minimal(path: Path, arch: str, **changes: Any) -> Path:
    """A GGUF file with metadata and an embedding, but no blocks."""
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "context_length": 128,
        "attention.head_count": 4,
        **changes,
    }
    for key, value in numbers.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", torch.zeros(320, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arch", "changes", "error", "message"),
    [
        ("mamba", {}, UnsupportedModelError, "architecture 'mamba' is not supported; supported are gemma2, "),
        ("llama", {"rope.scaling.type": "spiral"}, UnsupportedModelError, "rope scaling 'spiral'"),
        ("llama", {"attention.value_length": 8}, UnsupportedModelError, "values of 8 and keys of 16"),
        ("llama", {"block_count": None}, ModelFormatError, "does not say 'block_count'"),
        ("llama", {"block_count": 4_000_000_000}, ModelFormatError, "block_count=4000000000 must be"),
        ("llama", {"attention.head_count_kv": 3}, ModelFormatError, "4 query heads cannot share 3"),
        ("phi3", {"rope.scaling.type": "longrope"}, ModelFormatError, "needs the tensors rope_factors_short"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(
    arch: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(resolve_source(str(write_minimal(tmp_path / "m.gguf", arch, **changes))))
    with pytest.raises(error, match=message):
        model_config(checkpoint)


def test_a_gguf_file_without_blocks_names_the_first_tensor_it_misses(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"'blk.0.attn_norm.weight' of shape \[64\] is missing"):
        load(write_minimal(tmp_path / "m.gguf", "llama"))


def test_yarn_in_metadata_lengthens_the_context(tmp_path: Path) -> None:
    changes = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4, "rope.scaling.original_context_length": 128}
    config = model_config(open_checkpoint(resolve_source(str(write_minimal(tmp_path / "m.gguf", "llama", **changes)))))
    assert config.max_position_embeddings == 512
