"""Checkpoints: names, tensors and configuration, the same for both formats."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from safetensors.torch import save_file

from pagemill.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from pagemill.models.checkpoint import Checkpoint, open_checkpoint
from pagemill.models.sources import ModelSource, resolve_source
from tests.models.files import random_blocks, write_gguf

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.int64]


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(resolve_source(str(path)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.randn(3, 5, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"t0": tensors["t0"], "t1": tensors["t1"]}, folder / files[0])
    save_file({"t2": tensors["t2"], "t3": tensors["t3"]}, folder / files[1])
    weight_map = {"t0": files[0], "t1": files[0], "t2": files[1], "t3": files[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_come_back_bit_for_bit(dtype: torch.dtype, folder: Path) -> None:
    stored = (torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0)) * 50).abs().to(dtype)
    save_file(
        {"t": stored, "scalar": torch.tensor(3).to(dtype), "none": torch.zeros(0, 4, dtype=dtype)},
        folder / "model.safetensors",
    )
    checkpoint = opened(folder)
    assert torch.equal(checkpoint.tensor("t").to_torch(dtype), stored)
    assert torch.equal(checkpoint.tensor("t").to_torch(), stored.float())
    assert torch.equal(checkpoint.tensor("t").to_torch(dtype, rows=slice(2, 5)), stored[2:5])
    assert checkpoint.tensor("scalar").to_torch().item() == 3
    assert checkpoint.tensor("none").to_torch().shape == (0, 4)


def test_a_tensor_larger_than_one_chunk_is_whole(folder: Path) -> None:
    stored = torch.arange(3 * 700_001, dtype=torch.float32).view(3, -1)
    save_file({"t": stored}, folder / "model.safetensors")
    tensor = opened(folder).tensor("t")
    assert torch.equal(tensor.to_torch(torch.float64), stored.double())
    assert torch.equal(tensor.to_torch(rows=slice(1, None)), stored[1:])


def test_the_loaded_tensor_outlives_the_closed_checkpoint(folder: Path) -> None:
    save_file({"t": torch.ones(4)}, folder / "model.safetensors")
    checkpoint = opened(folder)
    tensor = checkpoint.tensor("t").to_torch()
    checkpoint.close()
    assert tensor.sum() == 4


def test_a_sharded_model_is_one_checkpoint(folder: Path) -> None:
    tensors = sharded(folder)
    checkpoint = opened(folder)
    assert sorted(checkpoint.names()) == sorted(tensors)
    assert all(torch.equal(checkpoint.tensor(name).to_torch(), tensor) for name, tensor in tensors.items())
    assert checkpoint.nbytes == 4 * 15 * 4


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="lacks model-00002-of-00002"):
        opened(folder)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"t9": "model-00001-of-00002.safetensors"}}, "t9"),
        ({"weight_map": {"t0": "../secret.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"t0": 3}}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ([1], "not a JSON object"),
    ],
)
def test_a_wrong_index_is_refused(index: object, reason: str, folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=reason):
        opened(folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    save_file({"t": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"no config\.json"):
        opened(tmp_path)


def test_a_config_that_is_not_json_is_refused(folder: Path) -> None:
    save_file({"t": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"config\.json is not JSON"):
        opened(folder)


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    save_file({"t": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ModelFormatError, match="no tensor 'u'"):
        opened(folder).tensor("u")


def test_gguf_tensors_dequantise_and_unpack_by_rows(tmp_path: Path) -> None:
    experts = random_blocks("Q6_K", 3 * 4, 512).reshape(3, 4, -1)
    half = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float16)
    path = write_gguf(tmp_path / "m.gguf", {"experts": ("Q6_K", experts), "half": ("F16", half)}, {"a": 1})
    checkpoint = opened(path)
    assert checkpoint.format == "gguf"
    assert checkpoint.config["general.architecture"] == "llama"
    tensor = checkpoint.tensor("experts")
    assert tensor.shape == (3, 4, 512)
    expected = quants.dequantize(experts, gguf.GGMLQuantizationType.Q6_K)
    np.testing.assert_array_equal(tensor.to_torch().numpy(), expected)
    np.testing.assert_array_equal(tensor.to_torch(rows=slice(1, 2)).numpy(), expected[1:2])
    unpacked = tensor.unpack(slice(2, 3))
    assert (unpacked.q.shape, unpacked.scale.shape, unpacked.bits, unpacked.group) == ((1, 4, 512), (1, 4, 32), 6, 16)
    weights = unpacked.q.reshape(1, 4, 32, 16) * unpacked.scale[..., None] + unpacked.minimum[..., None]
    np.testing.assert_allclose(weights.reshape(1, 4, 512), expected[2:], rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(checkpoint.tensor("half").to_torch(torch.float16).numpy(), half)
    with pytest.raises(UnsupportedModelError, match="no quantised blocks"):
        checkpoint.tensor("half").unpack()


def test_a_split_gguf_is_one_checkpoint(tmp_path: Path) -> None:
    one = np.ones((1, 4), np.float32)
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", {"a": ("F32", one)}, {"split.count": 2})
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", {"b": ("F32", one)}, {"split.count": 2})
    assert opened(first).names() == ["a", "b"]
    assert opened(tmp_path).names() == ["a", "b"]
    second.unlink()
    with pytest.raises(ModelNotFoundError, match="m-00002-of-00002"):
        opened(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFormatError, match="one of 2 parts"):
        opened(tmp_path / "renamed.gguf")


def test_the_embedded_model_unpacks_within_little_more_than_its_largest_tensor(embedded_source: ModelSource) -> None:
    checkpoint = open_checkpoint(embedded_source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(checkpoint.tensor(name).unpack().q.size for name in checkpoint.names() if "norm" not in name)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert total == 134_479_872
    assert grown < 80 << 20
