"""How much of the KV memory that is given out holds tokens (vLLM's paper calls the rest waste).

Owns the figures, from step to step. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagemill.core.kv_cache import KVCacheManager
from pagemill.core.request import Request

__all__ = ["SlotUsage"]


class SlotUsage:
    """Call :meth:`measure` once a step."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.allocated = self.filled = 0
        """Slots of the last step: one is one token of one kind of layer."""
        self._shares, self._steps = 0.0, 0

    def measure(self, requests: Iterable[Request], num_new_tokens: int) -> None:
        """Shared blocks are full: what is empty is at the end of each request's last block."""
        empty = sum([request.capacity - request.num_computed_tokens for request in requests]) - num_new_tokens
        self.allocated = self._kv.num_used_blocks * self._kv.block_size
        self.filled = self.allocated - empty * len(self._kv.pools)
        self._shares += self.filled / self.allocated
        self._steps += 1

    @property
    def mean(self) -> float:
        """The share that was filled, over all steps."""
        return self._shares / self._steps if self._steps else 1.0
