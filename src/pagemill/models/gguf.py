"""The header of a GGUF file: metadata and where each tensor lies, every length checked before it is believed.

Owns the container format (github.com/ggml-org/ggml, docs/gguf.md; versions 2 and 3, little-endian). Must not interpret
metadata or weights. Whatever the bytes are, the outcome is a :class:`GGUFFile`, a ModelFormatError or an
UnsupportedModelError, in time and memory proportional to the file's own size.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.gguf_blocks import BLOCK_FORMATS
from pagemill.models.mapped_file import MappedFile

__all__ = ["PLAIN_SIZES", "GGUFFile", "GGUFTensor", "is_gguf"]

MAGIC = b"GGUF"
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT = 1 << 16

PLAIN_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
"""Bytes of one element of the types that are not blocks."""

TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""ggml_type; those in neither PLAIN_SIZES nor BLOCK_FORMATS are named in the error that refuses them."""

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_LEAST_KEY = 8 + 4 + 1  # length of the key, type, value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # length of the name, number of dimensions, one dimension, type, offset


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. ``shape`` is outermost first; ``start`` and ``stop`` are bytes of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


def is_gguf(path: Path) -> bool:
    """Whether the file starts as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


class GGUFFile:
    """A mapped GGUF file: ``metadata`` (key -> number, bool, string or list of them) and ``tensors`` by name."""

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except BaseException:
            self.file.close()
            raise

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        magic = self._take(4)
        if magic != MAGIC:
            raise ModelFormatError(f"{self.file.path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        version = self._number("<I")
        if version not in (2, 3):
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3)
            what = "is big-endian" if big_endian else f"has format version {version}"
            raise UnsupportedModelError(f"{self.file.path} {what}; GGUF versions 2 and 3, little-endian, can be read")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        self._check_count("metadata keys", num_keys, _LEAST_KEY)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text("a metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(key, self._number("<I"))
        self._check_count("tensors", num_tensors, _LEAST_TENSOR)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return metadata, self._place(infos, self._alignment(metadata))

    def _take(self, count: int) -> bytes:
        data = self.file.read(self._at, self._at + count)
        self._at += count
        return data

    def _number(self, code: str) -> int:
        return int(struct.unpack(code, self._take(struct.calcsize(code)))[0])

    def _corrupt(self, why: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file.path} is corrupt: {why} (near byte {self._at}); fetch it again")

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        """A count that the rest of the file cannot hold is refused before any loop or allocation."""
        left = self.file.size - self._at
        if count * least_bytes > left:
            raise self._corrupt(f"it claims {count} {what}, but only {left} bytes follow")

    def _text(self, what: str) -> str:
        length = self._number("<Q")
        self._check_count(f"bytes of {what}", length, 1)
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8") from error

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._strings(key, 1)[0]
        if kind == _ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            if kind == _STRING:
                return self._strings(key, count)
            if kind == _ARRAY:
                raise UnsupportedModelError(f"{self.file.path}: metadata key {key!r} is an array of arrays")
            return self._numbers(key, kind, count)
        return self._numbers(key, kind, 1)[0]

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self._corrupt(f"metadata key {key!r} has unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self._check_count(f"values of {key!r}", count, dtype.itemsize)
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        return list((values != 0 if kind == _BOOL else values).tolist())

    def _strings(self, key: str, count: int) -> list[str]:
        """Strings of a vocabulary may hold broken UTF-8; it is replaced, not refused."""
        self._check_count(f"strings of {key!r}", count, 8)
        buffer, at, size, length_at = self.file.buffer, self._at, self.file.size, struct.Struct("<Q").unpack_from
        values = []
        for _ in range(count):
            start = at + 8
            stop = start + length_at(buffer, at)[0] if start <= size else start
            if stop > size:
                self._at = at
                raise self._corrupt(f"a string of {key!r} would end at byte {stop} of {size}")
            values.append(str(buffer[start:stop], "utf-8", "replace"))
            at = stop
        self._at = at
        return values

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        valid = isinstance(alignment, int) and 1 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not valid:
            raise self._corrupt(f"general.alignment={alignment!r} is not a power of two up to {MAX_ALIGNMENT}")
        return int(alignment)

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._text("a tensor's name")
        num_dims = self._number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = tuple(self._number("<Q") for _ in range(num_dims))
        number, offset = self._number("<I"), self._number("<Q")
        kind = TYPE_NAMES.get(number)
        if kind is None:
            raise self._corrupt(f"tensor {name!r} has unknown type {number}")
        return name, kind, dims[::-1], offset

    def _place(self, infos: list[tuple[str, str, tuple[int, ...], int]], alignment: int) -> dict[str, GGUFTensor]:
        """Absolute positions, each inside the file, aligned, and apart from the others."""
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in infos:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} occurs twice")
            nbytes = self._nbytes(name, kind, shape)
            if offset % alignment:
                raise self._corrupt(f"tensor {name!r} starts at offset {offset}, not a multiple of {alignment}")
            start, stop = base + offset, base + offset + nbytes
            if stop > self.file.size:
                raise ModelFormatError(
                    f"{self.file.path} ends at byte {self.file.size}, but tensor {name!r} needs bytes {start} to "
                    f"{stop}; the file is truncated or corrupt: fetch it again"
                )
            tensors[name] = GGUFTensor(name, kind, shape, start, stop)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for before, after in itertools.pairwise(ordered):
            if after.start < before.stop:
                raise self._corrupt(f"tensors {before.name!r} and {after.name!r} overlap at byte {after.start}")
        return tensors

    def _nbytes(self, name: str, kind: str, shape: tuple[int, ...]) -> int:
        if kind in PLAIN_SIZES:
            size, nbytes = 1, PLAIN_SIZES[kind]
        elif kind in BLOCK_FORMATS:
            size, nbytes = BLOCK_FORMATS[kind].size, BLOCK_FORMATS[kind].nbytes
        else:
            readable = ", ".join([*PLAIN_SIZES, *BLOCK_FORMATS])
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {name!r} has type {kind}, which cannot be read; take a file of {readable}"
            )
        if 0 in shape or shape[-1] % size:
            raise self._corrupt(f"tensor {name!r} of shape {list(shape)} is not made of whole blocks of {size}")
        return math.prod(shape) // size * nbytes

    def close(self) -> None:
        """Unmap the file."""
        self.file.close()
