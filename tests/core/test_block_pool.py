"""The block pool: a state machine against a plain model, and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pagemill.core.block_pool import BlockPool, FreeBlockQueue
from tests.core.fakes import state_machine_settings

NUM_BLOCKS = 12


def test_free_blocks_leave_in_order_and_from_the_middle():
    pool = BlockPool(4)
    first, second, third, last = pool.blocks
    pool.free.remove(second)
    pool.free.append(second)
    pool.free.remove(third)
    pool.free.prepend(third)
    assert list(pool.free) == [third, first, last, second]
    assert [pool.free.popleft().id for _ in range(4)] == [2, 0, 3, 1]
    assert len(pool.free) == 0


def test_an_empty_or_doubly_linked_list_is_caught():
    queue = FreeBlockQueue()
    with pytest.raises(AssertionError, match="empty"):
        queue.popleft()
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="already"):
        pool.free.append(pool.blocks[0])


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert [block.id for block in pool.allocate(3)] == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_the_end_of_a_chain_is_evicted_before_its_beginning_and_unpublished_blocks_before_all():
    pool = BlockPool(5)
    chain = pool.allocate(3)
    private = pool.allocate(1)
    for block in chain:
        pool.publish(block, bytes([block.id]))
    pool.release(chain)
    pool.release(private)
    assert [block.id for block in pool.free] == [3, 4, 2, 1, 0]
    pool.allocate(3)
    assert set(pool.published) == {bytes([0]), bytes([1])}


def test_each_block_says_who_holds_it():
    pool = BlockPool(5)
    shared, cached, private = pool.allocate(3)
    for block in (shared, cached):
        pool.publish(block, bytes([block.id]))
    pool.share([shared])
    pool.release([cached])
    assert pool.states() == "scpff"
    pool.release([private])
    pool.release([shared])
    assert pool.states() == "pcfff"


def test_a_shared_block_survives_its_first_holder():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"x")
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0
    pool.share(blocks)
    assert pool.num_used == 1
    assert pool.published == {b"x": blocks[0]}


def test_equal_blocks_are_not_merged_and_a_double_release_is_caught():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.publish(block, b"same")
    assert blocks[0].hash == b"same"
    assert blocks[1].hash is None
    pool.release(blocks[1:])
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks[1:])


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and release chains; the model is counts of holders and a list in eviction order."""

    chains = Bundle("chains")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders = [0] * NUM_BLOCKS
        self.order = list(range(NUM_BLOCKS))
        self.hashes: dict[bytes, int] = {}
        self.num_hashes = 0

    @rule(target=chains, count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        blocks = self.pool.allocate(count)
        if count > len(self.order):
            assert blocks is None
            return []
        expected, self.order = self.order[:count], self.order[count:]
        assert [block.id for block in blocks] == expected
        for block_id in expected:
            self.holders[block_id] = 1
            self.hashes = {name: b for name, b in self.hashes.items() if b != block_id}
        return blocks

    @rule(chain=chains, fresh=st.booleans())
    def publish(self, chain, fresh):
        for block in chain:
            self.num_hashes += fresh or not self.num_hashes
            name = self.num_hashes.to_bytes(4, "big")
            if self.holders[block.id] and block.id not in self.hashes.values() and name not in self.hashes:
                self.hashes[name] = block.id
            if self.holders[block.id]:
                self.pool.publish(block, name)

    @precondition(lambda self: self.hashes)
    @rule(target=chains, data=st.data())
    def share(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.hashes)), unique=True, max_size=5))
        blocks = [self.pool.published[name] for name in names]
        assert [block.id for block in blocks] == [self.hashes[name] for name in names]
        self.pool.share(blocks)
        for block in blocks:
            if self.holders[block.id] == 0:
                self.order.remove(block.id)
            self.holders[block.id] += 1
        return blocks

    @rule(chain=consumes(chains))
    def release(self, chain):
        self.pool.release(chain)
        for block in reversed(chain):
            self.holders[block.id] -= 1
            if self.holders[block.id] == 0:
                if block.id in self.hashes.values():
                    self.order.append(block.id)
                else:
                    self.order.insert(0, block.id)

    @rule(chain=chains)
    def unpublish(self, chain):
        for block in chain:
            if self.holders[block.id]:
                self.pool.unpublish(block)
                self.hashes = {name: b for name, b in self.hashes.items() if b != block.id}

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_invariants()
        assert [block.id for block in self.pool.free] == self.order
        assert [block.ref_count for block in self.pool.blocks] == self.holders
        assert {name: block.id for name, block in self.pool.published.items()} == self.hashes
        assert self.pool.num_used == sum(count > 0 for count in self.holders)


class TestPool(PoolMachine.TestCase):
    settings = state_machine_settings(num_steps=2_000)


@pytest.mark.slow
class TestPoolForLong(PoolMachine.TestCase):
    settings: settings = state_machine_settings(num_steps=10_000)
