"""Finding computed prefixes: chained block hashes, the longest hit over all KV groups, and publishing.

Owns what a hash means; the pools own which block carries it. A hash names the whole text up to its block's end:
hash(block) = H(hash(parent), tokens), and the root is H(extra keys). H is BLAKE2b under a key drawn at start, so
neither a collision nor a prefix known to be cached can be prepared from outside.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from pagemill.core.block_pool import NULL_BLOCK, Block, BlockPool
from pagemill.core.messages import EngineRequest
from pagemill.core.request import Request

__all__ = ["BlockHasher", "NoPrefixCache", "PrefixCache", "PrefixLookup", "extra_keys", "window_start"]

DIGEST_BYTES = 16


def extra_keys(message: EngineRequest) -> list[tuple[str, str]]:
    """What, besides its tokens, a cached block's content or visibility depends on, as (kind, value)."""
    keys = []
    if message.cache_salt is not None:
        keys.append(("salt", message.cache_salt))
    if message.tenant:
        keys.append(("tenant", message.tenant))
    return keys


class BlockHasher:
    """The keyed, chained hash of full blocks."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        self._key = key if key is not None else secrets.token_bytes(32)

    def root(self, keys: Sequence[tuple[str, str]]) -> bytes:
        """Parent of the first block. Kind and value are length-prefixed: no two lists of keys look alike."""
        parts = [text.encode() for pair in keys for text in pair]
        framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake2b(framed, key=self._key, digest_size=DIGEST_BYTES, person=b"root").digest()

    def extend(self, root: bytes, hashes: list[bytes], token_ids: list[int], num_blocks: int) -> None:
        """Append the hashes of the full blocks up to ``num_blocks``."""
        first, size = len(hashes), self.block_size
        parent = hashes[-1] if hashes else root
        packed = array("q", token_ids[first * size : num_blocks * size]).tobytes()
        width = 8 * size
        for start in range(0, len(packed), width):
            chained = parent + packed[start : start + width]
            parent = blake2b(chained, key=self._key, digest_size=DIGEST_BYTES).digest()
            hashes.append(parent)


def window_start(position: int, window: int | None, block_size: int) -> int:
    """First block that a query at ``position`` (and all later ones) still sees; it sees ``window`` tokens itself."""
    return 0 if window is None else max(0, position - window + 1) // block_size


class PrefixLookup(Protocol):
    """What the KV cache asks of a prefix cache; :class:`NoPrefixCache` is the null object."""

    enabled: bool

    def open(self, request: Request) -> None:
        """Hash the full blocks of a new request's prompt."""

    def match(self, request: Request) -> list[list[Block]]:
        """Per group, the block table of the longest usable prefix (all of one length; nothing is held yet)."""

    def publish(self, request: Request) -> None:
        """Make the request's computed full blocks findable."""

    def forget(self, request: Request) -> None:
        """Unpublish all that the request holds: its content is not to be trusted."""


class PrefixCache:
    """Longest-prefix lookup over pools that all use one block size. ``windows``: per group, tokens or None."""

    enabled = True

    def __init__(self, hasher: BlockHasher, pools: Sequence[BlockPool], windows: Sequence[int | None]) -> None:
        self._hasher = hasher
        self._pools = pools
        self._groups = list(zip(pools, windows, strict=True))
        self._latest: tuple[list[int], bytes, list[bytes]] = ([], b"", [])
        """The prompt that was hashed last, its root and its hashes: its completions come one after another."""

    def open(self, request: Request) -> None:
        """Hash the full blocks of a new request's prompt."""
        prompt, root = request.message.prompt_token_ids, self._root(request)
        if self._latest[0] is prompt and self._latest[1] == root:
            request.block_hashes += self._latest[2]
            return
        num_blocks = request.num_prompt_tokens // self._hasher.block_size
        self._hasher.extend(root, request.block_hashes, request.token_ids, num_blocks)
        self._latest = prompt, root, list(request.block_hashes)

    def match(self, request: Request) -> list[list[Block]]:
        """Per group, the block table of the longest prefix that every group holds.

        Never all tokens: the last one is computed for its logits. A full-attention group needs every block from the
        start; a window group only those that the next query sees.
        """
        if not request.reads_cache:
            return [[] for _ in self._groups]
        size = self._hasher.block_size
        hashes = request.block_hashes
        length = min(len(hashes), (len(request.token_ids) - 1) // size)
        agreed = -1
        while length != agreed:  # shortening for one group may undo another's window
            agreed = length
            for pool, window in self._groups:
                length = _longest(pool.published, hashes, length, window, size)
        return [self._table(pool, hashes, length, window) for pool, window in self._groups]

    def _table(self, pool: BlockPool, hashes: list[bytes], length: int, window: int | None) -> list[Block]:
        first = window_start(length * self._hasher.block_size, window, self._hasher.block_size)
        return [NULL_BLOCK] * first + [pool.published[block_hash] for block_hash in hashes[first:length]]

    def publish(self, request: Request) -> None:
        """Make the request's computed full blocks findable."""
        first = request.num_published_blocks
        last = request.num_computed_tokens // self._hasher.block_size
        hashes = request.block_hashes
        if last > len(hashes):
            self._hasher.extend(self._root(request), hashes, request.token_ids, last)
        for pool, table in zip(self._pools, request.block_tables, strict=True):
            for index in range(first, last):
                block = table[index]
                if block is not NULL_BLOCK:
                    pool.publish(block, hashes[index])
        request.num_published_blocks = last

    def forget(self, request: Request) -> None:
        """Unpublish all that the request holds."""
        for pool, table in zip(self._pools, request.block_tables, strict=True):
            for block in table:
                pool.unpublish(block)

    def _root(self, request: Request) -> bytes:
        return self._hasher.root(extra_keys(request.message))


class NoPrefixCache:
    """Caching off: finds nothing, keeps nothing."""

    enabled = False

    def open(self, request: Request) -> None:
        """Nothing to prepare."""

    def match(self, request: Request) -> list[list[Block]]:
        """Never a hit."""
        return [[] for _ in request.block_tables]

    def publish(self, request: Request) -> None:
        """Nothing is kept."""

    def forget(self, request: Request) -> None:
        """Nothing was kept."""


def _longest(published: dict[bytes, Block], hashes: list[bytes], limit: int, window: int | None, size: int) -> int:
    """The greatest length <= ``limit`` (blocks) at which one group holds all that is needed to go on."""
    if window is None:
        for index in range(limit):
            if hashes[index] not in published:
                return index
        return limit
    length = limit
    while length > 0:
        first = window_start(length * size, window, size)
        missing = next((i for i in range(length - 1, first - 1, -1) if hashes[i] not in published), None)
        if missing is None:
            return length
        length = missing
    return 0
