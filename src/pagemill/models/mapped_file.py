"""A weight file mapped into memory, read-only, whose pages are given back after use.

Owns the mapping and the bounds of every view cut from it. Must not know what the bytes mean. Pages of a mapping count
as this process's memory once touched; :meth:`MappedFile.release` drops them, so that loading a model needs little
more than the memory of its result.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagemill.errors import ModelFormatError, ModelNotFoundError

__all__ = ["Bytes", "MappedFile"]

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """The bytes of one file, ``size`` of them. ``buffer`` is the mapping, for loops that check bounds themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise ModelFormatError(f"{path} is empty (0 bytes); fetch it again")
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelNotFoundError(f"cannot open {path}: {error.strerror or error}") from error
        self._bytes: Bytes = np.frombuffer(self.buffer, dtype=np.uint8)

    def read(self, start: int, stop: int) -> bytes:
        """A copy of ``[start, stop)``; raises ModelFormatError past the end."""
        self._check(start, stop)
        return self.buffer[start:stop]

    def view(self, start: int, stop: int) -> Bytes:
        """A read-only view of ``[start, stop)``; raises ModelFormatError past the end."""
        self._check(start, stop)
        return self._bytes[start:stop]

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise ModelFormatError(
                f"{self.path} ends at byte {self.size}, but bytes {start} to {stop} are needed; "
                "the file is truncated or corrupt: fetch it again"
            )

    def release(self, start: int, stop: int) -> None:
        """Give back the whole pages inside ``[start, stop)``; they are read again when touched."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and not self.buffer.closed:
            self.buffer.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Unmap, or leave that to the last view that is still in use."""
        self._bytes = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self.buffer.close()
