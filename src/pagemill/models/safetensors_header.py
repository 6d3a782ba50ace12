"""The header of a safetensors file, checked against the file before a byte of a tensor is read.

Owns the container format (github.com/huggingface/safetensors, "Format"). Must not convert or load weights. Whatever the
bytes are, the outcome is a :class:`SafetensorsFile` or a ModelFormatError.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.models.mapped_file import MappedFile

__all__ = ["ITEM_SIZES", "SafetensorsFile", "StoredRange"]

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 64

ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class StoredRange:
    """One tensor: ``start`` and ``stop`` are bytes of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A mapped safetensors file and its ``tensors`` by name."""

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.file.close()
            raise

    def _corrupt(self, why: str) -> ModelFormatError:
        return ModelFormatError(f"{self.file.path} is not a valid safetensors file: {why}; fetch it again")

    def _read_header(self) -> dict[str, StoredRange]:
        if self.file.size < 8:
            raise self._corrupt(f"it has {self.file.size} bytes, fewer than the 8 of a header length")
        length = int.from_bytes(self.file.read(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, self.file.size - 8):
            raise self._corrupt(f"its header claims {length} bytes of {self.file.size} (most: {MAX_HEADER_BYTES})")
        try:
            header = json.loads(self.file.read(8, 8 + length), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        tensors = {
            name: self._tensor(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
        }
        self._check_layout(tensors, 8 + length)
        return tensors

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise self._corrupt(f"{name!r} occurs twice in its header")
            found[name] = value
        return found

    def _tensor(self, name: str, entry: Any, base: int) -> StoredRange:
        if not isinstance(entry, dict):
            raise self._corrupt(f"the entry of tensor {name!r} is not an object")
        kind, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
        if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2:
            raise self._corrupt(f"tensor {name!r} lacks a valid dtype, shape or data_offsets")
        if len(shape) > MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {len(shape)} dimensions (most: {MAX_DIMS})")
        if kind not in ITEM_SIZES:
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {name!r} has type {kind}, not one of {', '.join(ITEM_SIZES)}"
            )
        start, stop = offsets
        nbytes = math.prod(shape) * ITEM_SIZES[kind]
        if start > stop or base + stop > self.file.size:
            raise self._corrupt(
                f"tensor {name!r} lies at bytes {start} to {stop} of {self.file.size - base}; the file is truncated"
            )
        if stop - start != nbytes:
            raise self._corrupt(
                f"tensor {name!r} of shape {list(shape)} and type {kind} has {stop - start} bytes, not {nbytes}"
            )
        return StoredRange(name, kind, shape, base + start, base + stop)

    def _check_layout(self, tensors: dict[str, StoredRange], base: int) -> None:
        """Tensors fill the data without holes or overlaps, as the format demands."""
        end, last = base, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop)):
            if tensor.start != end:
                raise self._corrupt(f"tensor {tensor.name!r} starts at byte {tensor.start}, but {last!r} ends at {end}")
            end, last = tensor.stop, tensor.name
        if end != self.file.size:
            raise self._corrupt(f"{self.file.size - end} bytes follow its last tensor")

    def close(self) -> None:
        """Unmap the file."""
        self.file.close()


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of non-negative 63-bit integers; None for anything else."""
    if isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        return tuple(value)
    return None
