"""Rotated int8: what is folded cancels exactly, and rounding costs little even where channels are very unequal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.config import EngineConfig
from pagemill.kernels.reference import hadamard
from pagemill.models import int8
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.decoder import Decoder
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from pagemill.quant.int8 import Int8Weight, round_rows
from pagemill.quant.int8_cache import Int8Cache
from pagemill.quant.method import LinearShape
from pagemill.quant.rotation import Rotation, hadamard_block
from tests.models.paged import logits_of
from tests.models.test_decoder import prompt
from tests.models.tiny import tiny_checkpoint, tiny_llama

FOLDABLE = ["llama", "llama_bias", "llama3", "smollm3", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "granite"]
UNROTATED = ["gemma2", "gemma3", "olmo2"]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))


def load(path: Path, **options: Any) -> Decoder:
    return load_model(open_checkpoint(resolve_source(str(path))), EngineConfig(**options), native=False)


class ExactWeight(Int8Weight):
    """Takes the place of the int8 weight, but rounds nothing: what is left is the folding."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.exact = torch.empty(shape.out_features, shape.in_features)

    def write(self, row: int, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.exact[row : row + len(q)] = q * scale[:, None]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.exact, self.bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.exact[ids.long()]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", FOLDABLE + UNROTATED)
def test_what_is_folded_into_weights_cancels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(family, tmp_path / "m")
    expected = logits_of(load(path), prompt(30))
    monkeypatch.setattr(int8, "Int8Weight", ExactWeight)
    monkeypatch.setattr(int8, "round_rows", lambda x: (x.float(), torch.ones(len(x))))
    monkeypatch.setattr(Int8Cache, "_write", lambda self, q, scale: None)
    torch.testing.assert_close(logits_of(load(path, quantization="int8"), prompt(30)), expected, atol=2e-4, rtol=0)


def test_norms_before_a_block_lose_their_weight_and_those_after_keep_it(tmp_path: Path) -> None:
    rotated = load(tiny_checkpoint("llama3", tmp_path / "a"), quantization="int8")
    assert torch.equal(rotated.layers[0].attn_norm, torch.ones(64))
    assert rotated.before_head is not None
    kept = load(tiny_checkpoint("gemma2", tmp_path / "b"), quantization="int8")
    assert kept.layers[0].attn_post_norm.std() > 0.1
    assert kept.before_head is None


def test_rotation_makes_rounding_cheap_where_a_channel_stands_out() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 576), torch.randn(96, 576) / 24
    x[:, 7] *= 100
    rotation = Rotation(576)

    def error(x: torch.Tensor, w: torch.Tensor) -> float:
        weight = Int8Weight(LinearShape(out_features=96, in_features=576), torch.float32, torch.device("cpu"))
        weight.write(0, *round_rows(w))
        return float((weight.apply(x) - x @ w.T).norm() / (x @ w.T)[:, :].norm())

    w[:, 7] = 0  # what the others carry is all that counts
    assert error(rotation.columns(x), rotation.columns(w)) < 0.25 * error(x, w)


@pytest.mark.parametrize("size", [64, 96, 576, 7 * 128, 35, 1536])
def test_rotations_are_orthogonal_and_spread_every_channel(size: int) -> None:
    matrix = Rotation(size).columns(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-5, rtol=0)
    assert matrix.abs().max() < 1.5 / size**0.5 * 1.01
    x = torch.randn(5, size)
    torch.testing.assert_close(Rotation(size).columns(x), x @ matrix)
    torch.testing.assert_close(Rotation(size).rows(x.T), matrix.T @ x.T)


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    x = torch.randn(3, 96)
    torch.testing.assert_close(hadamard(hadamard(x, 32), 32), x)
    matrix = hadamard(torch.eye(4), 4) * 2
    assert matrix.tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    wide = torch.randn(2, 1024)
    assert torch.allclose(hadamard(wide, 1024)[:, 0], wide.sum(1) / 32, atol=1e-4)
    torch.testing.assert_close(hadamard(hadamard(wide, 1024), 1024), wide)
    assert [hadamard_block(size) for size in (1536, 96, 7, 1 << 20)] == [512, 32, 0, 1024]


def test_rounding_keeps_zeros_and_extremes() -> None:
    q, scale = round_rows(torch.tensor([[0.0, 0.0], [2.0, -4.0]]))
    assert q.tolist() == [[0, 0], [64, -127]]
    assert scale.tolist() == pytest.approx([0.0, 4 / 127])


def test_a_second_start_reads_what_the_first_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "m")
    first = load(path, quantization="int8")
    (folder,) = (tmp_path / "cache" / "int8").iterdir()
    monkeypatch.setattr(int8, "round_rows", None)  # computing again would fail
    second = load(path, quantization="int8")
    assert torch.equal(logits_of(first, prompt(9)), logits_of(second, prompt(9)))
    monkeypatch.undo()
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    (folder / "weights.bin").write_bytes(b"short")
    assert torch.equal(logits_of(load(path, quantization="int8"), prompt(9)), logits_of(first, prompt(9)))
    (folder / "index.json").write_text(json.dumps({"head": 3}))
    assert torch.equal(logits_of(load(path, quantization="int8"), prompt(9)), logits_of(first, prompt(9)))


def test_another_file_of_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    first = logits_of(load(path, quantization="int8"), prompt(9))
    tiny_llama(path, seed=5)
    assert not torch.equal(logits_of(load(path, quantization="int8"), prompt(9)), first)
    assert len(list((tmp_path / "cache" / "int8").iterdir())) == 2


def test_a_cache_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "file"))
    load(tiny_llama(tmp_path / "m"), quantization="int8")
    assert "not cached" in caplog.text
