"""Memory that large requests leave behind is given back to the system.

What parsing and tokenising megabytes took is free again afterwards, but the C library keeps it for the next time, on
every thread that was used. Owns when it is asked to give it back: a moment after the last large request.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable

__all__ = ["MemoryReturn"]

logger = logging.getLogger("pagemill.server")

LARGE_BYTES = 256 * 1024
"""Of a body; smaller ones leave nothing that matters."""
PAUSE_S = 1.0


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc alone has it
    except (OSError, AttributeError, TypeError):
        return None
    return trim


class MemoryReturn:
    """Asked after each request."""

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._is_due = False

    def note(self, num_bytes: int) -> None:
        """A request with a body of this size has ended; what it took is given back soon, once for many."""
        if num_bytes >= LARGE_BYTES and self._trim is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(PAUSE_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        assert self._trim is not None
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
