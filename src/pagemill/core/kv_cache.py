"""What a request may hold of the KV cache: one block pool per kind of layer, kept in step.

Owns the requests' block tables, in every group of equal length (a block index means the same tokens everywhere;
NULL_BLOCK where a window has moved past). Decides nothing about who goes first; never touches memory.

Side effects in order, for one request: ``match`` (none) -> ``claim`` -> ``allocate`` before each step ->
``settle`` after it (publish, then drop what a window left behind) -> ``free``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pagemill.core.block_pool import NULL_BLOCK, Block, BlockPool
from pagemill.core.messages import BlockCopy
from pagemill.core.prefix_cache import BlockHasher, NoPrefixCache, PrefixCache, PrefixLookup, window_start
from pagemill.core.request import NEVER, Request
from pagemill.errors import ConfigError

__all__ = ["KVCacheManager", "KVCacheSpec"]


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: the layers that share a block table."""

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    block_size: int
    """Tokens per block; the same in all groups of a model."""
    window: int | None = None
    """A query sees this many tokens, itself included; None for full attention."""
    bytes_per_block: int
    """K and V of all layers of the group."""
    num_blocks: int

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that one request of ``num_tokens`` holds at once when computed in chunks of up to ``chunk``."""
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        seen = self.window - 1 + chunk  # tokens from the first that the chunk's first query sees to its last
        return min(blocks, -(-(seen - 1) // self.block_size) + 1)


class KVCacheManager:
    """Block tables of all requests, over one pool per group."""

    def __init__(
        self,
        specs: Sequence[KVCacheSpec],
        enable_prefix_caching: bool,
        *,
        max_model_len: int = NEVER,
        max_chunk: int = NEVER,
        hash_key: bytes | None = None,
    ) -> None:
        sizes = {spec.block_size for spec in specs}
        if len(sizes) != 1:
            raise ConfigError(f"KV cache groups have block sizes {sorted(sizes)}; they must have one in common")
        self.block_size = sizes.pop()
        self.specs = tuple(specs)
        self.max_chunk, self.max_request_tokens = _limits(specs, self.block_size, max_model_len, max_chunk)
        self.pools = [BlockPool(spec.num_blocks) for spec in specs]
        self._windows = [(i, spec.window) for i, spec in enumerate(specs) if spec.window is not None]
        self.prefix_cache: PrefixLookup = NoPrefixCache()
        if enable_prefix_caching:
            hasher = BlockHasher(self.block_size, hash_key)
            self.prefix_cache = PrefixCache(hasher, self.pools, [spec.window for spec in specs])

    # ---- what would it take -------------------------------------------------------------------------------------

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether an empty cache holds a request of so many tokens."""
        return num_tokens <= self.max_request_tokens

    def shortfall(self, request: Request, hit: list[list[Block]]) -> list[int]:
        """Per group, free blocks that computing all the request's tokens takes, starting from ``hit``."""
        num_tokens = len(request.token_ids)
        num_new = -(-num_tokens // self.block_size) - len(hit[0])
        taken = []
        for spec, table in zip(self.specs, hit, strict=True):
            unheld = sum(block.ref_count == 0 and block is not NULL_BLOCK for block in table)
            taken.append(min(spec.max_blocks(num_tokens, self.max_chunk), num_new + unheld))
        return taken

    def outstanding(self, request: Request) -> list[int]:
        """Per group, blocks that an admitted request will still take for the tokens it has."""
        return [
            max(0, spec.max_blocks(len(request.token_ids), self.max_chunk) - len(table) + skipped)
            for spec, table, skipped in zip(self.specs, request.block_tables, request.num_skipped_blocks, strict=True)
        ]

    # ---- taking and giving back -----------------------------------------------------------------------------------

    def claim(self, request: Request, hit: list[list[Block]]) -> None:
        """Start a request that holds nothing from a cached prefix (``match``'s answer, maybe empty)."""
        for group, table in enumerate(hit):
            skipped = table.count(NULL_BLOCK)
            self.pools[group].share(table[skipped:])
            request.num_skipped_blocks[group] = skipped
        request.block_tables = hit
        request.capacity = request.num_computed_tokens = len(hit[0]) * self.block_size
        request.num_published_blocks = len(hit[0])
        self._schedule_settling(request)

    def allocate(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Extend the tables to cover ``num_tokens``: per group the ids of the new blocks, or None and no change."""
        size = self.block_size
        count = -(-num_tokens // size) - request.capacity // size
        for pool in self.pools:
            if count > pool.free.num_blocks:
                return None
        added = []
        for pool, table in zip(self.pools, request.block_tables, strict=True):
            blocks = pool.allocate(count)
            assert blocks is not None
            table += blocks
            added.append([block.id for block in blocks])
        request.capacity += count * size
        return added

    def settle(self, request: Request) -> None:
        """After computing: publish blocks that became full, drop those that every later query is past."""
        self.prefix_cache.publish(request)
        for group, window in self._windows:
            first = window_start(request.num_computed_tokens, window, self.block_size)
            skipped = request.num_skipped_blocks[group]
            if first > skipped:
                table = request.block_tables[group]
                self.pools[group].release(table[skipped:first])
                table[skipped:first] = [NULL_BLOCK] * (first - skipped)
                request.num_skipped_blocks[group] = first
        self._schedule_settling(request)

    def free(self, request: Request) -> None:
        """Let go of everything; the request could start again from token 0."""
        for group, pool in enumerate(self.pools):
            pool.release(request.block_tables[group][request.num_skipped_blocks[group] :])
            request.block_tables[group] = []
            request.num_skipped_blocks[group] = 0
        request.capacity = request.num_computed_tokens = request.num_published_blocks = 0
        request.settle_at = NEVER

    def fork(self, source: Request, target: Request) -> list[BlockCopy] | None:
        """Let ``target``, which holds nothing, go on where ``source`` is: None if there is no room.

        Full blocks are shared. The last, partly filled one will be written by both: the target gets a copy, which the
        worker must make before its next forward pass.
        """
        size = self.block_size
        num_full = source.num_computed_tokens // size
        num_tail = -(-source.num_computed_tokens // size) - num_full
        if any(num_tail > pool.num_free for pool in self.pools):
            return None
        copies = []
        for group, pool in enumerate(self.pools):
            table = source.block_tables[group]
            skipped = source.num_skipped_blocks[group]
            pool.share(table[skipped:num_full])
            tail = pool.allocate(num_tail)
            assert tail is not None
            copies += [BlockCopy(group, table[num_full].id, block.id) for block in tail]
            target.block_tables[group] = table[:num_full] + tail
            target.num_skipped_blocks[group] = skipped
        target.num_computed_tokens = source.num_computed_tokens
        target.capacity = (num_full + num_tail) * size
        target.num_published_blocks = min(source.num_published_blocks, num_full)
        target.block_hashes = source.block_hashes[:num_full]
        self._schedule_settling(target)
        return copies

    def _schedule_settling(self, request: Request) -> None:
        at = NEVER
        if self.prefix_cache.enabled:
            at = (request.num_published_blocks + 1) * self.block_size
        for group, window in self._windows:
            at = min(at, (request.num_skipped_blocks[group] + 1) * self.block_size + window - 1)
        request.settle_at = at

    # ---- what is held -------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold, shared ones counted once."""
        return sum(pool.num_used for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of blocks in use, of the fullest group."""
        return max(pool.num_used / pool.num_blocks for pool in self.pools)

    def block_states(self) -> list[str]:
        """Per group, the letter of each block (see :meth:`~pagemill.core.block_pool.BlockPool.states`)."""
        return [pool.states() for pool in self.pools]

    def check_invariants(self, holders: Sequence[Request]) -> None:
        """The pools' own invariants; reference counts are exactly the tables' entries; only full blocks are shared."""
        for group, (pool, spec) in enumerate(zip(self.pools, self.specs, strict=True)):
            pool.check_invariants()
            counts = [0] * pool.num_blocks
            for request in holders:
                table, skipped = request.block_tables[group], request.num_skipped_blocks[group]
                assert skipped == window_start(request.num_computed_tokens, spec.window, self.block_size)
                assert all(block is NULL_BLOCK for block in table[:skipped])
                assert len(table) * self.block_size == request.capacity
                assert len(table) - skipped <= spec.max_blocks(len(request.token_ids), self.max_chunk)
                for index, block in enumerate(table[skipped:], start=skipped):
                    counts[block.id] += 1
                    if block.hash is not None:
                        assert block.hash == request.block_hashes[index]
                    if (index + 1) * self.block_size > request.num_computed_tokens:
                        assert block.ref_count == 1, f"{block} of {request} is shared and will be written"
                        assert block.hash is None, f"{block} of {request} is published and not computed"
            assert counts == [block.ref_count for block in pool.blocks]


def _limits(specs: Sequence[KVCacheSpec], size: int, max_model_len: int, max_chunk: int) -> tuple[int, int]:
    """Most tokens of one request in one step, and most that one request may have, so that one alone always fits."""
    longest = NEVER
    for spec in specs:
        slots = spec.num_blocks * size
        if slots >= max_model_len:
            continue
        # Most tokens a chunk may have beside a full window (the inverse of max_blocks). If even one is too many, the
        # window is larger than the pool, which therefore bounds the length as it does with full attention.
        beside = slots - size + 2 - spec.window if spec.window is not None else 0
        if beside >= 1:
            max_chunk = min(max_chunk, beside)
        else:
            longest = min(longest, slots)
    return max_chunk, longest
