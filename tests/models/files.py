"""Small model files for tests: GGUF by gguf-py's own writer, safetensors byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

__all__ = ["random_blocks", "safetensors_bytes", "write_gguf"]


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes that are valid rows of a ggml type. Half-precision scales are kept finite. [rows, bytes]"""
    size, nbytes = gguf.GGML_QUANT_SIZES[Q[kind]]
    data = np.random.default_rng(seed).integers(0, 256, (rows * columns // size, nbytes), dtype=np.uint8)
    for at in SCALE_BYTES.get(kind, ()):
        data[:, at + 1] = data[:, at + 1] & 0xBF | 0x20  # exponent between 8 and 23 of 31
    return data.reshape(rows, -1)


SCALE_BYTES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
"""Where the float16 scales of a block are."""


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, np.ndarray]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """``tensors``: name -> (ggml type, data); block types as uint8 rows. ``metadata``: by Python type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (kind, data) in (tensors or {}).items():
        writer.add_tensor(name, data, raw_dtype=Q[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with whatever header a test wants."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
