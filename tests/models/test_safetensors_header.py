"""Safetensors headers: checked against the file before a tensor is read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.safetensors_header import SafetensorsFile
from tests.models.files import safetensors_bytes


def entry(shape: Any = (2, 2), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


CORRUPT = {
    "shorter than a length": (b"1234", "4 bytes"),
    "length past the end": ((1 << 20).to_bytes(8, "little") + b"{}", "claims 1048576 bytes"),
    "absurd length": (b"\xff" * 8 + b"{}", "claims 18446744073709551615"),
    "not json": (safetensors_bytes(b"{oops"), "not JSON"),
    "not utf-8": (safetensors_bytes(b'{"\xff": 1}'), "not JSON"),
    "nested without end": (safetensors_bytes(b"[" * 100_000), "not JSON"),
    "not an object": (safetensors_bytes(b"[]"), "not a JSON object"),
    "entry not an object": (safetensors_bytes({"t": 1}), "'t' is not an object"),
    "no dtype": (safetensors_bytes({"t": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "lacks a valid dtype"),
    "negative size": (safetensors_bytes({"t": entry(shape=(-2, 2))}, bytes(16)), "lacks a valid"),
    "size not whole": (safetensors_bytes({"t": entry(shape=(2.0, 2))}, bytes(16)), "lacks a valid"),
    "size a bool": (safetensors_bytes({"t": entry(shape=(True, 4))}, bytes(16)), "lacks a valid"),
    "three offsets": (safetensors_bytes({"t": entry(offsets=(0, 8, 16))}, bytes(16)), "lacks a valid"),
    "offset past the end": (safetensors_bytes({"t": entry()}, bytes(8)), "truncated"),
    "offsets swapped": (safetensors_bytes({"t": entry(offsets=(16, 0))}, bytes(16)), "16 to 0"),
    "wrong number of bytes": (safetensors_bytes({"t": entry(shape=(2, 3))}, bytes(16)), "16 bytes, not 24"),
    "product past 64 bits": (safetensors_bytes({"t": entry(shape=(1 << 40, 1 << 40))}, bytes(16)), "16 bytes, not"),
    "overlap": (safetensors_bytes({"t": entry(), "u": entry(offsets=(8, 24))}, bytes(24)), "'t' ends at"),
    "hole": (safetensors_bytes({"t": entry(offsets=(8, 24))}, bytes(24)), "'the header' ends at"),
    "bytes after the end": (safetensors_bytes({"t": entry()}, bytes(20)), "4 bytes follow"),
    "name twice": (safetensors_bytes(b'{"t": {}, "t": {}}'), "'t' occurs twice"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_headers_are_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    data, reason = CORRUPT[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=reason) as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(safetensors_bytes({"t": entry(dtype="F4")}, bytes(16)))
    with pytest.raises(UnsupportedModelError, match="type F4"):
        SafetensorsFile(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.touch()
    with pytest.raises(ModelFormatError, match="empty"):
        SafetensorsFile(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 330), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 400)),
)
def test_mutated_files_raise_only_our_errors(tmp_path: Path, edits: list[tuple[int, bytes]], cut: int | None) -> None:
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(1.0)}
    data = bytearray(save(tensors, metadata={"format": "pt"}))
    for at, piece in edits:
        data[at : at + len(piece)] = piece
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(bytes(data[:cut]))
    with suppress(ModelFormatError, UnsupportedModelError):
        file = SafetensorsFile(path)
        assert all(8 <= tensor.start <= tensor.stop <= file.file.size for tensor in file.tensors.values())
