"""The map of KV blocks, for those who watch: the page's live view.

Owns how often the engine is asked: it answers between two steps, so all who watch share one answer, renewed at most
every :data:`RENEWED_S`. Must not know what a block holds or whose it is.
"""

from __future__ import annotations

import asyncio
import time

from pagemill.server.engine_port import Engine

__all__ = ["BlockMap"]

RENEWED_S = 0.4


class BlockMap:
    """The newest map, asked for when somebody looks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asking: asyncio.Task[list[str]] | None = None
        self._asked_s = 0.0

    async def groups(self) -> list[str]:
        """Per kind of layer, a letter for each block. Raises what the engine raised."""
        now_s = time.monotonic()
        if self._asking is None or (self._asking.done() and now_s - self._asked_s >= RENEWED_S):
            self._asked_s = now_s
            self._asking = asyncio.ensure_future(self._engine.call("block_states"))
        return await asyncio.shield(self._asking)  # others may wait for it when this one goes away
