"""What requests hold: growth, sliding windows, forks, and the limits that let one request alone always fit."""

from __future__ import annotations

import pytest

from pagemill.core.kv_cache import KVCacheManager
from pagemill.core.messages import BlockCopy
from pagemill.core.request import NEVER, Request
from pagemill.errors import ConfigError
from tests.core.fakes import full, request, window


def start(kv: KVCacheManager, num_tokens: int, first: int = 0) -> Request:
    """A request whose tokens are all but one computed."""
    message = request("r", range(first, first + num_tokens))
    started = Request(message, sequence=0, max_total_tokens=NEVER, num_groups=len(kv.specs))
    kv.prefix_cache.open(started)
    kv.claim(started, kv.prefix_cache.match(started))
    compute(kv, started, num_tokens - 1)
    return started


def compute(kv: KVCacheManager, running: Request, num_tokens: int) -> list[list[int]] | None:
    while len(running.token_ids) < num_tokens:
        running.token_ids.append(0)
    added = kv.allocate(running, num_tokens)
    if added is not None:
        running.num_computed_tokens = num_tokens
        kv.settle(running)
    return added


def test_a_request_holds_exactly_the_blocks_that_its_tokens_need():
    kv = KVCacheManager([full(8)], enable_prefix_caching=False)
    running = start(kv, 2)
    for num_tokens in range(2, 30):
        compute(kv, running, num_tokens)
        assert kv.num_used_blocks == -(-num_tokens // 4)
        kv.check_invariants([running])
    kv.free(running)
    assert kv.num_used_blocks == 0


def test_growing_fails_in_all_groups_or_in_none():
    kv = KVCacheManager([full(8), full(4)], enable_prefix_caching=False)
    running = start(kv, 13)
    assert kv.allocate(running, 17) is None
    assert kv.num_used_blocks == 6
    kv.check_invariants([running])


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8, 9])
def test_blocks_behind_a_window_are_dropped_as_soon_as_no_query_sees_them(size):
    kv = KVCacheManager([window(64, size=size)], enable_prefix_caching=True)
    running = start(kv, 2)
    for num_tokens in range(2, 60):
        compute(kv, running, num_tokens)
        first_seen = max(0, num_tokens - size + 1) // 4
        assert kv.num_used_blocks == -(-num_tokens // 4) - min(first_seen, -(-num_tokens // 4))
        kv.check_invariants([running])
    kv.free(running)
    assert kv.num_used_blocks == 0


def test_a_hit_behind_a_window_takes_only_what_is_seen():
    kv = KVCacheManager([full(64), window(64, size=6)], enable_prefix_caching=True)
    kv.free(start(kv, 33))
    table = kv.prefix_cache.match(
        again := Request(request("x", range(33)), sequence=1, max_total_tokens=NEVER, num_groups=2)
    )
    assert table == [[], []]
    kv.prefix_cache.open(again)
    kv.claim(again, kv.prefix_cache.match(again))
    assert again.num_computed_tokens == 32
    assert [pool.num_used for pool in kv.pools] == [8, 2]
    assert again.new_row().block_ids[1][:6] == [-1] * 6
    kv.check_invariants([again])


def test_a_fork_shares_full_blocks_and_copies_the_last():
    kv = KVCacheManager([full(8)], enable_prefix_caching=True)
    source = start(kv, 11)
    target = Request(request("fork", source.token_ids), sequence=1, max_total_tokens=NEVER, num_groups=1)
    assert kv.fork(source, target) == [BlockCopy(0, 2, 3)]
    assert target.num_computed_tokens == 10
    assert kv.num_used_blocks == 4
    kv.check_invariants([source, target])
    for running in (source, target, source):
        compute(kv, running, running.num_computed_tokens + 1)
        kv.check_invariants([source, target])
    kv.free(source)
    kv.check_invariants([target])
    kv.free(target)
    assert kv.num_used_blocks == 0


def test_a_fork_at_a_block_border_copies_nothing_and_one_without_room_does_not_happen():
    kv = KVCacheManager([full(3)], enable_prefix_caching=True)
    source = start(kv, 9)
    target = Request(request("fork", source.token_ids), sequence=1, max_total_tokens=NEVER, num_groups=1)
    assert kv.fork(source, target) == []
    assert kv.num_used_blocks == 2
    kv.free(target)
    compute(kv, source, 9)
    assert kv.fork(source, target) is None
    kv.check_invariants([source])


@pytest.mark.parametrize("size", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("chunk", [1, 2, 4, 7])
def test_the_bound_on_a_windows_blocks_is_never_exceeded_and_is_reached(size, chunk):
    spec = window(64, size=size)
    most = 0
    for computed in range(40):
        first = max(0, computed - size + 1) // 4
        most = max(most, -(-(computed + chunk) // 4) - first)
    assert most == spec.max_blocks(60, chunk)


@pytest.mark.parametrize("num_blocks", range(1, 8))
@pytest.mark.parametrize("size", [1, 3, 4, 6, 9])
def test_one_request_alone_always_fits_within_the_limits(num_blocks, size):
    spec = window(num_blocks, size=size)
    kv = KVCacheManager([spec], enable_prefix_caching=False, max_model_len=100, max_chunk=16)
    if kv.max_request_tokens == NEVER:
        assert spec.max_blocks(100, kv.max_chunk) <= num_blocks
        assert kv.max_chunk == 16 or spec.max_blocks(100, kv.max_chunk + 1) > num_blocks
    else:
        assert kv.max_request_tokens == 4 * num_blocks
        assert spec.max_blocks(100, 1) > num_blocks


def test_groups_must_have_one_block_size():
    with pytest.raises(ConfigError, match=r"\[4, 8\]"):
        KVCacheManager([full(4), full(4, block_size=8)], enable_prefix_caching=True)
