"""KV blocks and who holds them: reference counts, the free list, and the map of published hashes.

Owns every :class:`Block` of one KV cache group. Knows block ids, not tokens or requests; never touches memory.

The free list is the eviction order::

    head  <- handed out first                     handed out last ->  tail
    [blocks without a hash] [cached, released long ago] ... [cached, released just now]

A chain is released back to front, so its end is evicted before its beginning: a prefix outlives what follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["NULL_BLOCK", "Block", "BlockPool", "FreeBlockQueue"]


class Block:
    """One page of KV memory. ``prev`` and ``next`` link it into the free list while nobody holds it."""

    __slots__ = ("hash", "id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        """Set while the block is published: what it holds can be found by this hash."""
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.ref_count}, hash={self.hash.hex()[:8] if self.hash else None})"


NULL_BLOCK = Block(-1)
"""Stands in block tables where a sliding window has moved past; holds nothing and is never handed out."""


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: O(1) at both ends and in the middle, no allocation."""

    __slots__ = ("_first", "_last", "num_blocks")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self.num_blocks = 0
        self._first = Block(-2)  # sentinels: every listed block has two neighbours
        self._last = Block(-3)
        self._first.next = self._last
        self._last.prev = self._first
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        """Add at the tail: handed out last."""
        before = self._last.prev
        assert before is not None
        self._link(before, block, self._last)

    def prepend(self, block: Block) -> None:
        """Add at the head: handed out first."""
        after = self._first.next
        assert after is not None
        self._link(self._first, block, after)

    def popleft(self) -> Block:
        """Take the block at the head."""
        block = self._first.next
        assert block is not None
        assert block is not self._last, "the free list is empty"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it stands."""
        before, after = block.prev, block.next
        assert before is not None, f"{block} is not in the free list"
        assert after is not None
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self.num_blocks -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.next is None, f"{block} is in the free list already"
        before.next = after.prev = block
        block.prev = before
        block.next = after
        self.num_blocks += 1

    def __iter__(self) -> Iterator[Block]:
        block = self._first.next
        while block is not self._last:
            assert block is not None
            yield block
            block = block.next

    def __len__(self) -> int:
        return self.num_blocks


class BlockPool:
    """All blocks of one group. A block is held (``ref_count`` > 0) or free; a free one may still be published."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free = FreeBlockQueue(self.blocks)
        self.published: dict[bytes, Block] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self.free.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return self.num_blocks - self.free.num_blocks

    def states(self) -> str:
        """A letter for each block, by id: free, cached (free, and found by its hash), private (one holder), shared.

        Walks all blocks: for whoever looks on, not for steps.
        """
        return "".join(
            [
                ("s" if block.ref_count > 1 else "p") if block.ref_count else "f" if block.hash is None else "c"
                for block in self.blocks
            ]
        )

    def allocate(self, count: int) -> list[Block] | None:
        """``count`` blocks for one holder, or None and no change. What a block held before is forgotten."""
        if count > self.free.num_blocks:
            return None
        taken = []
        for _ in range(count):
            block = self.free.popleft()
            self.unpublish(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[Block]) -> None:
        """Hold published blocks once more."""
        for block in blocks:
            if block.ref_count == 0:
                self.free.remove(block)
            block.ref_count += 1

    def release(self, blocks: list[Block]) -> None:
        """Let go of a chain of blocks (given front to back)."""
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is released more often than it was taken"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.hash is None:
                    self.free.prepend(block)
                else:
                    self.free.append(block)

    def publish(self, block: Block, block_hash: bytes) -> None:
        """Make a computed block findable. If an equal one is published already, this one stays private."""
        if block.hash is None and block_hash not in self.published:
            block.hash = block_hash
            self.published[block_hash] = block

    def unpublish(self, block: Block) -> None:
        """Forget what the block holds."""
        if block.hash is not None:
            del self.published[block.hash]
            block.hash = None

    def check_invariants(self) -> None:
        """Used + free = total; the free list has no duplicates and only unheld blocks; hashes are their blocks'."""
        free = list(self.free)
        assert len({block.id for block in free}) == len(free) == self.free.num_blocks
        assert all(block.ref_count == 0 for block in free)
        held = sum(block.ref_count > 0 for block in self.blocks)
        assert held + len(free) == self.num_blocks
        assert all(block.hash == block_hash for block_hash, block in self.published.items())
        assert sum(block.hash is not None for block in self.blocks) == len(self.published)
        assert NULL_BLOCK.ref_count == 0
        assert NULL_BLOCK.hash is None
