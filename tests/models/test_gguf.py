"""GGUF headers: what is valid is read, and everything else is refused in one line."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.gguf import GGUFFile, is_gguf
from tests.models.files import random_blocks, write_gguf

METADATA = {
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.5,
    "tokenizer.ggml.add_bos_token": True,
    "general.languages": ["en", "日本"],
    "some.numbers": [1, 2, 3],
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor_info(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def padded(data: bytes, extra: int = 64) -> bytes:
    return data + bytes(-len(data) % 32 + extra)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    blocks = random_blocks("Q4_1", 2, 64)
    return write_gguf(tmp_path / "small.gguf", {"a": ("F32", matrix), "b": ("Q4_1", blocks)}, METADATA)


def test_metadata_and_tensors_of_a_written_file_are_read(small: Path) -> None:
    assert is_gguf(small)
    file = GGUFFile(small)
    for key, value in METADATA.items():
        assert file.metadata[key] == value
    assert file.tensors["a"].shape == (3, 4)
    assert file.tensors["b"].shape == (2, 64)
    assert file.tensors["b"].type == "Q4_1"
    a = file.tensors["a"]
    np.testing.assert_array_equal(file.file.view(a.start, a.stop).view(np.float32), np.arange(12, dtype=np.float32))


CORRUPT = {
    "wrong magic": (b"GGML" + bytes(64), "does not start|starts with"),
    "cut in the magic": (b"GG", "ends at byte 2"),
    "cut in the counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "truncated"),
    "absurd number of keys": (header(keys=1 << 62), "4611686018427387904 metadata keys"),
    "absurd number of tensors": (header(tensors=1 << 62), "tensors"),
    "absurd key length": (header(keys=1) + struct.pack("<Q", 1 << 60) + bytes(64), "bytes of a metadata key"),
    "key not utf-8": (header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(64), "not UTF-8"),
    "unknown value type": (header(keys=1) + text("k") + struct.pack("<I", 77) + bytes(8), "unknown type 77"),
    "absurd array": (
        header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(8),
        "values of 'k'",
    ),
    "absurd string array": (
        header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(8),
        "strings of 'k'",
    ),
    "string past the end": (header(keys=1) + text("k") + struct.pack("<IQ", 8, 1 << 40) + bytes(8), "string of 'k'"),
    "key twice": (header(keys=2) + 2 * (text("k") + struct.pack("<II", 4, 7)), "'k' occurs twice"),
    "alignment not a power of two": (
        padded(header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 24)),
        "general.alignment=24",
    ),
    "alignment zero": (padded(header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0)), "alignment=0"),
    "alignment a string": (
        padded(header(keys=1) + text("general.alignment") + struct.pack("<I", 8) + text("32")),
        "alignment='32'",
    ),
    "no dimensions": (padded(header(tensors=1) + tensor_info("t", (), 0, 0)), "0 dimensions"),
    "too many dimensions": (padded(header(tensors=1) + tensor_info("t", (1,) * 5, 0, 0)), "5 dimensions"),
    "a dimension of zero": (padded(header(tensors=1) + tensor_info("t", (0, 4), 0, 0)), "whole blocks"),
    "unknown tensor type": (padded(header(tensors=1) + tensor_info("t", (4,), 4, 0)), "unknown type 4"),
    "row of half a block": (padded(header(tensors=1) + tensor_info("t", (16, 2), 8, 0)), "whole blocks of 32"),
    "product past 64 bits": (padded(header(tensors=1) + tensor_info("t", (1 << 40, 1 << 40), 0, 0)), "truncated"),
    "offset past the end": (padded(header(tensors=1) + tensor_info("t", (4,), 0, 1 << 50)), "ends at byte"),
    "offset not aligned": (padded(header(tensors=1) + tensor_info("t", (4,), 0, 8)), "not a multiple of 32"),
    "name twice": (padded(header(tensors=2) + 2 * tensor_info("t", (4,), 0, 0)), "'t' occurs twice"),
    "overlap": (
        padded(header(tensors=2) + tensor_info("t", (16,), 0, 0) + tensor_info("u", (4,), 0, 32)),
        "'t' and 'u' overlap",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_headers_are_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    data, reason = CORRUPT[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=reason) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    end = max(tensor.stop for tensor in GGUFFile(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(end):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFormatError):
            GGUFFile(cut)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(version=1) + bytes(64), "format version 1"),
        (header(version=99) + bytes(64), "format version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (padded(header(tensors=1) + tensor_info("t", (256,), 16, 0), 256), "IQ2_XXS"),
        (padded(header(keys=1) + text("k") + struct.pack("<IIQIQ", 9, 9, 1, 4, 1)), "array of arrays"),
    ],
)
def test_what_is_valid_but_not_readable_is_named(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=reason):
        GGUFFile(path)


def test_broken_utf8_in_a_vocabulary_is_replaced_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    entry = text("tokens") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 1) + b"\xff" + text("b")
    path.write_bytes(padded(header(keys=1) + entry))
    assert GGUFFile(path).metadata["tokens"] == ["�", "b"]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 600), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 800)),
)
def test_mutated_files_raise_only_our_errors(small: Path, edits: list[tuple[int, bytes]], cut: int | None) -> None:
    data = bytearray(small.read_bytes())
    for at, piece in edits:
        data[at : at + len(piece)] = piece
    path = small.with_name("mutated.gguf")
    path.write_bytes(bytes(data[:cut]))
    with suppress(ModelFormatError, UnsupportedModelError):
        file = GGUFFile(path)
        assert all(0 <= tensor.start <= tensor.stop <= file.file.size for tensor in file.tensors.values())
