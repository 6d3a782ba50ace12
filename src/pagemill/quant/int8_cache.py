"""Converted int8 weights on disk, so that the next start reads them instead of computing them again.

Owns one folder per model: ``weights.bin``, the arrays one after another, and ``index.json``, where each lies. A folder
appears under its name only when it is complete. A cache that cannot be read or written costs time, never a start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch

__all__ = ["Int8Cache", "Rounded"]

logger = logging.getLogger(__name__)

VERSION = 1
"""Raised whenever the same checkpoint would be converted to other numbers."""

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Rows as int8 [n, K] and their scales, float32 [n]."""


class Int8Cache:
    """The matrices of one checkpoint by name: read if they are there, else kept as they are computed.

    Use as a context manager; leaving it without an error makes what was computed visible.
    """

    def __init__(self, root: Path, files: Sequence[Path], variant: str) -> None:
        """``files`` are the checkpoint's; a change of size or time makes another cache. ``variant``: how converted."""
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = hashlib.sha256(json.dumps([VERSION, variant, stats]).encode()).hexdigest()[:32]
        self.path = root / "int8" / key
        self._index: dict[str, list[dict[str, int]]] = {}
        self._source: BinaryIO | None = None
        self._target: BinaryIO | None = None
        self._partial: Path | None = None
        if not self._open():
            self._create()

    @property
    def is_complete(self) -> bool:
        """Whether the matrices are on disk already."""
        return self._source is not None

    def pieces(self, name: str, compute: Iterator[Rounded]) -> Iterator[Rounded]:
        """The matrix ``name``, rows top to bottom: read, or else computed and kept."""
        if self._source is not None:
            for entry in self._index[name]:
                yield self._read(entry)
            return
        entries = self._index.setdefault(name, [])
        for q, scale in compute:
            if self._target is not None:
                entries.append({"start": self._target.tell(), "rows": q.shape[0], "columns": q.shape[1]})
                self._write(q, scale)
            yield q, scale

    def _read(self, entry: dict[str, int]) -> Rounded:
        assert self._source is not None
        q, scale = torch.empty(entry["rows"], entry["columns"], dtype=torch.int8), torch.empty(entry["rows"])
        self._source.seek(entry["start"])
        for part in (scale, q):
            self._source.readinto(part.numpy().data)  # type: ignore[attr-defined]
        return q, scale

    def _write(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        assert self._target is not None
        try:
            for part in (scale, q):
                self._target.write(part.contiguous().numpy().data)
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._source is not None:
            self._source.close()
        if self._target is None or self._partial is None:
            return
        try:
            self._target.close()
            if kind is None:
                (self._partial / "index.json").write_text(json.dumps(self._index))
                os.rename(self._partial, self.path)
                logger.info("int8 weights are kept in %s", self.path)
        except OSError as failure:
            if not self.path.exists():  # else another process was quicker
                logger.warning("int8 weights are not cached: %s", failure)
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _open(self) -> bool:
        try:
            self._index = json.loads((self.path / "index.json").read_text())
            size = (self.path / "weights.bin").stat().st_size
            if size != sum(e["rows"] * (e["columns"] + 4) for entries in self._index.values() for e in entries):
                raise ValueError(f"{self.path} is truncated")
            self._source = (self.path / "weights.bin").open("rb")
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("cached int8 weights cannot be used (%s); they are computed again", error)
            shutil.rmtree(self.path, ignore_errors=True)
            return False
        return True

    def _create(self) -> None:
        self._index = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self.path.parent))
            self._target = (self._partial / "weights.bin").open("wb")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("int8 weights are not cached: %s", error)
        if self._target is not None:
            self._target.close()
            self._target = None
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
