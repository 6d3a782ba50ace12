"""Work on long texts, kept off the event loop: which thread does it, how much of it waits, and for whom it is not done.

A short text is done at once: a thread would cost more than it saves. A long one takes one of asyncio's threads. A very
long one waits for the only thread of its kind: tokenised side by side such texts would take memory by the gigabyte, and
cores that the model needs. Must not know what the work is, nor give a thread a low priority: one that is kept from its
core while it holds the interpreter keeps everybody waiting.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagemill.errors import QueueFullError
from pagemill.server.body import raise_if_gone

__all__ = ["off_loop"]

INLINE_CHARS = 8192
"""Up to here tokenising costs well under a millisecond."""
LARGE_CHARS = 256 * 1024
"""From here on it takes a tenth of a second and more."""
MOST_WAITING = 32
"""Very long texts that may wait; each holds a body of megabytes."""

T = TypeVar("T")


async def off_loop(chars: int, work: Callable[[], T]) -> T:
    """Run ``work`` on a text of this length here, or in a thread (tokenizers release the GIL).

    Raises ClientDisconnect, with nothing done, where the client is gone by the time it is its turn.
    """
    if chars <= INLINE_CHARS:
        return work()
    if chars <= LARGE_CHARS:
        result = await asyncio.to_thread(work)
    else:
        result = await _very_long.run(work)
    raise_if_gone()
    return result


class _OneAtATime:
    """The thread for very long texts, and who waits for it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._waiting >= MOST_WAITING:
            raise QueueFullError(
                f"{self._waiting} texts of more than {LARGE_CHARS:,} characters wait; try again in a moment, or send"
                " less at once"
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pagemill-long-text")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, _unless_gone(work))
        finally:
            self._waiting -= 1


def _unless_gone(work: Callable[[], T]) -> Callable[[], T]:
    context = contextvars.copy_context()

    def checked() -> T:
        raise_if_gone()
        return work()

    return lambda: context.run(checked)


_very_long = _OneAtATime()
