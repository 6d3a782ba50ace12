"""What a file holds is what the kernels' layouts hold: integers exactly, scales to float16's precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pagemill._native", reason="the native library is not built")

from pagemill import _native
from pagemill.config import EngineConfig
from pagemill.models.checkpoint import Checkpoint, open_checkpoint
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from pagemill.quant.matrix import Matrix
from pagemill.quant.method import LinearShape, Target, choose, method
from pagemill.quant.native import NativeWeight
from tests.models.files import SCALE_BYTES, random_blocks, write_gguf
from tests.models.paged import logits_of
from tests.models.test_decoder import prompt
from tests.models.tiny import tiny_checkpoint

TARGET = Target(dtype=torch.bfloat16, device=torch.device("cpu"), explicit=False, native=True)
F16_SCALES = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}
ROWS, COLUMNS = 24, 512


def pack(matrices: list[Matrix], *, gated: bool = False, bias: torch.Tensor | None = None) -> NativeWeight:
    height = sum(matrix.shape[0] for matrix in matrices)
    shape = LinearShape(out_features=height, in_features=matrices[0].shape[1], gated=gated, bias=bias is not None)
    weight = method(choose(matrices, TARGET)).create(shape, matrices, TARGET)
    row = 0
    for matrix in matrices:
        weight.pack(row, matrix)
        row += matrix.shape[0]
    if bias is not None:
        weight.pack_bias(bias)
    assert isinstance(weight, NativeWeight)
    return weight


def checkpoint_of(path: Path, *kinds: str) -> Checkpoint:
    tensors = {f"t{i}": (kind, random_blocks(kind, ROWS, COLUMNS, seed=i)) for i, kind in enumerate(kinds)}
    return open_checkpoint(resolve_source(str(write_gguf(path / "m.gguf", tensors))))


@pytest.mark.parametrize("kind", SCALE_BYTES)
def test_every_block_format_keeps_its_values(kind: str, tmp_path: Path) -> None:
    stored = checkpoint_of(tmp_path, kind).tensor("t0")
    weight = pack([Matrix(stored=stored)])
    assert weight.packed.kind == ("group4" if kind in ("Q4_0", "Q4_1", "Q4_K") else "group8")
    precision = 0.0 if kind in F16_SCALES else 2e-3 * float(stored.to_torch().abs().max())
    torch.testing.assert_close(weight.dequantize(), stored.to_torch(), atol=precision, rtol=0)


@pytest.mark.parametrize(
    ("kinds", "in_pairs"),
    [
        (("Q8_0",), True), (("Q6_K",), True), (("Q5_0",), True), (("Q3_K",), True), (("IQ4_NL",), True),
        (("Q4_0", "Q8_0"), True), (("Q8_0", "Q5_1"), True),
        (("Q4_0",), False), (("Q4_1",), False), (("Q4_K",), False), (("Q5_1",), False), (("Q5_K",), False),
        (("Q2_K",), False), (("Q4_K", "Q6_K"), False),
    ],
)  # fmt: skip
def test_rows_are_rounded_in_pairs_only_for_integers_of_8_bits(
    kinds: tuple[str, ...], in_pairs: bool, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(tmp_path, *kinds)
    packed = pack([Matrix(stored=checkpoint.tensor(f"t{i}")) for i in range(len(kinds))]).packed
    forms = {}
    before = _native.isa()
    for name in _native.available_isas():
        _native.set_isa(name)
        forms[name] = packed.activation_kind
    _native.set_isa(before)
    assert forms == {name: "i8_group_pairs" if in_pairs and name == "avx2" else "i8_group" for name in forms}


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q4_0", "Q4_1"), ("Q4_K", "Q5_K", "Q3_K")])
def test_parts_of_different_formats_share_one_packed_matrix(kinds: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, *kinds)
    parts = [checkpoint.tensor(f"t{i}") for i in range(len(kinds))]
    bias = torch.randn(ROWS * len(kinds))
    weight = pack([Matrix(stored=part) for part in parts], bias=bias)
    expected = torch.cat([part.to_torch() for part in parts])
    torch.testing.assert_close(weight.dequantize(), expected, atol=2e-3 * float(expected.abs().max()), rtol=0)
    x = torch.randn(3, COLUMNS)
    torch.testing.assert_close(weight.apply(x), x @ weight.dequantize().T + bias)


def test_rows_can_be_reordered_and_cut_on_the_way(tmp_path: Path) -> None:
    stored = checkpoint_of(tmp_path, "Q4_1").tensor("t0")
    order = np.random.default_rng(0).permutation(ROWS)
    matrix = Matrix(stored=stored, order=order, rows=slice(4, 20), columns=slice(64, 256))
    assert torch.equal(pack([matrix]).dequantize(), stored.to_torch()[order][4:20, 64:256])


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "bf16")])
def test_plain_numbers_keep_their_type_or_the_nearest_one_there_is(
    dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama_bias", tmp_path / "m", dtype=dtype)
    checkpoint = open_checkpoint(resolve_source(str(path)))
    decoder = load_model(checkpoint, EngineConfig(), native=True)
    assert {weight.packed.kind for layer in decoder.layers for weight in layer.mlp.weights} == {kind}
    assert decoder.layers[0].mlp.gate_up.packed.gated
    got = logits_of(decoder, prompt(20))
    expected = logits_of(load_model(checkpoint, EngineConfig(dtype="float32"), native=False), prompt(20))
    torch.testing.assert_close(got, expected, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0)
