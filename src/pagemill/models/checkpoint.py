"""An open checkpoint: its configuration and its tensors by name, whatever the file format.

Owns reading and converting stored tensors, a few megabytes at a time, and giving the mapped pages back as it goes.
Must not know architectures or rename tensors. torch is imported only where a torch tensor is asked for, so that the
front's process reads configuration and tokenizer without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from pagemill.models.gguf import PLAIN_SIZES, GGUFFile, GGUFTensor
from pagemill.models.gguf_blocks import BLOCK_FORMATS, BlockFormat
from pagemill.models.mapped_file import Bytes, MappedFile
from pagemill.models.safetensors_header import ITEM_SIZES, SafetensorsFile, StoredRange
from pagemill.models.sources import ModelSource, weight_files

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "StoredTensor", "Unpacked", "open_checkpoint", "read_json"]

CHUNK_BYTES = 4 << 20
"""Stored bytes converted at a time."""

TORCH_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


class Unpacked(NamedTuple):
    """A quantised tensor as the file has it: weight = scale * q + minimum, group by group along the last dimension."""

    q: Bytes  # [..., N, K], 0 to 2**bits - 1
    scale: npt.NDArray[np.float32]  # [..., N, K / group]
    minimum: npt.NDArray[np.float32]  # [..., N, K / group]
    bits: int
    group: int


class StoredTensor:
    """One tensor in a mapped file. ``shape`` is outermost first; ``data`` is a view of its bytes."""

    __slots__ = ("_file", "_start", "data", "name", "shape", "type")

    def __init__(self, file: MappedFile, entry: GGUFTensor | StoredRange) -> None:
        self.name = entry.name
        self.shape = entry.shape
        self.type = entry.type
        self.data = file.view(entry.start, entry.stop)
        self._file = file
        self._start = entry.start

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.size)

    def release(self) -> None:
        """Give the tensor's pages back; they are read again when touched."""
        self._file.release(self._start, self._start + self.nbytes)

    def to_torch(self, dtype: torch.dtype | None = None, rows: slice | None = None) -> torch.Tensor:
        """A tensor of its own memory, dequantised and converted to ``dtype`` (default: float32).

        ``rows`` (a slice without step) takes part of the first dimension only.
        """
        import torch

        dtype = torch.float32 if dtype is None else dtype
        shape, start, stop = self._select(rows)
        out = torch.empty(shape, dtype=dtype)
        flat = out.view(-1)
        done = 0
        form = BLOCK_FORMATS.get(self.type)
        stored: torch.dtype = getattr(torch, TORCH_TYPES.get(self.type, "uint8"))
        for chunk in self._chunks(start, stop):
            if form:
                values = torch.from_numpy(form.dequantise(chunk.reshape(-1, form.nbytes))).view(-1)
            else:
                values = torch.from_numpy(chunk.copy()).view(stored)
            flat[done : done + len(values)].copy_(values)
            done += len(values)
        return out

    def unpack(self, rows: slice | None = None) -> Unpacked:
        """The file's integers, scales and minimums. Block formats only."""
        form = BLOCK_FORMATS.get(self.type)
        if form is None:
            raise UnsupportedModelError(f"tensor {self.name!r} has type {self.type}, which holds no quantised blocks")
        shape, start, stop = self._select(rows)
        groups = (*shape[:-1], shape[-1] // form.group)
        result = Unpacked(
            np.empty(shape, np.uint8),
            np.empty(groups, np.float32),
            np.empty(groups, np.float32),
            form.bits,
            form.group,
        )
        q, scale, minimum = result.q.reshape(-1), result.scale.reshape(-1), result.minimum.reshape(-1)
        at = 0
        for chunk in self._chunks(start, stop):
            codes = form.unpack(chunk.reshape(-1, form.nbytes))
            n = codes.scale.size
            q[at * form.group : (at + n) * form.group] = codes.q.reshape(-1)
            scale[at : at + n] = codes.scale.reshape(-1)
            minimum[at : at + n] = codes.minimums().reshape(-1)
            at += n
        return result

    def _select(self, rows: slice | None) -> tuple[tuple[int, ...], int, int]:
        """The shape of some rows, and their first and last byte in ``data``."""
        if rows is None:
            return self.shape, 0, self.nbytes
        first, last, step = rows.indices(self.shape[0])
        assert step == 1
        last = max(first, last)
        row_bytes = self.nbytes // self.shape[0] if self.shape[0] else 0
        return (last - first, *self.shape[1:]), first * row_bytes, last * row_bytes

    def _chunks(self, start: int, stop: int) -> Iterator[Bytes]:
        unit = _unit_bytes(self.type)
        step = CHUNK_BYTES // unit * unit
        for at in range(start, stop, step):
            end = min(at + step, stop)
            yield self.data[at:end]
            self._file.release(self._start + at, self._start + end)


def _unit_bytes(kind: str) -> int:
    form: BlockFormat | None = BLOCK_FORMATS.get(kind)
    return form.nbytes if form else ITEM_SIZES.get(kind) or PLAIN_SIZES[kind]


class Checkpoint:
    """Configuration and tensors of one model. Close it when the weights are loaded."""

    def __init__(
        self,
        source: ModelSource,
        files: list[GGUFFile] | list[SafetensorsFile],
        *,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None = None,
        tokenizer_config: dict[str, Any] | None = None,
    ) -> None:
        self.source = source
        self.format: Literal["safetensors", "gguf"] = source.format
        self.config = config
        """config.json, or the metadata of a GGUF file."""
        self.generation_config = generation_config or {}
        """generation_config.json; empty for GGUF."""
        self.tokenizer_config = tokenizer_config or {}
        """tokenizer_config.json; empty for GGUF."""
        self._files = files
        self._where: dict[str, tuple[MappedFile, GGUFTensor | StoredRange]] = {}
        for file in files:
            for name, entry in file.tensors.items():
                if name in self._where:
                    raise ModelFormatError(
                        f"{self._where[name][0].path} and {file.file.path} both hold tensor {name!r}"
                    )
                self._where[name] = (file.file, entry)

    def names(self) -> list[str]:
        """The tensors' names, as stored."""
        return list(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of this name; raises ModelFormatError where there is none."""
        if name not in self._where:
            raise ModelFormatError(f"{self.source.path} has no tensor {name!r}; the checkpoint is incomplete")
        return StoredTensor(*self._where[name])

    @property
    def paths(self) -> list[Path]:
        """The files that hold the tensors."""
        return [file.file.path for file in self._files]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.stop - entry.start for _, entry in self._where.values())

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files:
            file.close()


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Map the files of ``source`` and check their headers.

    Raises ModelNotFoundError, ModelFormatError or UnsupportedModelError.
    """
    if source.format == "gguf":
        return _open_gguf(source)
    config = read_json(source.path / "config.json")
    if config is None:
        raise ModelFormatError(f"{source.path} has no config.json, so the model's architecture is unknown")
    weight_map = _weight_map(source.path)
    paths = weight_files(source.path, weight_map and weight_map.values())
    checkpoint = Checkpoint(
        source,
        [SafetensorsFile(path) for path in paths],
        config=config,
        generation_config=read_json(source.path / "generation_config.json"),
        tokenizer_config=read_json(source.path / "tokenizer_config.json"),
    )
    for name, file in (weight_map or {}).items():
        if name not in checkpoint:
            raise ModelFormatError(f"{source.path}: its index says that {file} holds tensor {name!r}; it does not")
    return checkpoint


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, for a model in several files."""
    path = folder / "model.safetensors.index.json"
    index = read_json(path)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelFormatError(f"{path} has no weight_map from tensors to files; fetch it again")
    return weight_map


_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def _open_gguf(source: ModelSource) -> Checkpoint:
    """One file, or all of ``name-00001-of-0000N.gguf`` (whose first file holds the metadata)."""
    paths = [source.path]
    split = _SPLIT_NAME.fullmatch(source.path.name)
    if split:
        count = int(split["count"])
        paths = [source.path.with_name(f"{split['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelNotFoundError(f"{source.path} is one of {count} parts, but {missing[0]} is not beside it")
    files = [GGUFFile(path) for path in paths]
    parts = files[0].metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > len(files):
        raise ModelFormatError(
            f"{source.path} is one of {parts} parts; keep their names ending in -00001-of-{parts:05}"
        )
    return Checkpoint(source, files, config=files[0].metadata)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None where there is no file. Raises ModelFormatError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(value, Mapping):
        raise ModelFormatError(f"{path} holds a {type(value).__name__}, not a JSON object; fetch it again")
    return dict(value)
