"""Hashes that mean exactly one text for exactly one audience, and hits on which all groups agree."""

from __future__ import annotations

import pytest

from pagemill.core.block_pool import NULL_BLOCK, BlockPool
from pagemill.core.prefix_cache import BlockHasher, NoPrefixCache, PrefixCache, extra_keys, window_start
from pagemill.core.request import NEVER, Request
from tests.core.fakes import request

SIZE = 4


def make_request(num_tokens: int, num_groups: int = 1, **fields) -> Request:
    message = request("r", range(num_tokens), **fields)
    return Request(message, sequence=0, max_total_tokens=NEVER, num_groups=num_groups)


def hashes(token_ids: list[int], keys=(), key: bytes = b"k") -> list[bytes]:
    hasher, found = BlockHasher(SIZE, key), []
    hasher.extend(hasher.root(keys), found, token_ids, len(token_ids) // SIZE)
    return found


def test_a_hash_depends_on_all_tokens_before_and_on_the_key():
    one, two = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9]), hashes([1, 2, 3, 4, 5, 6, 7, 9])
    assert len(one) == len(two) == 2
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert hashes([0, 2, 3, 4, 5, 6, 7, 8])[1] != one[1]
    assert not set(one) & set(hashes([1, 2, 3, 4, 5, 6, 7, 8], key=b"other"))


def test_every_process_hashes_under_its_own_key():
    first, second = BlockHasher(SIZE), BlockHasher(SIZE)
    assert first.root([]) != second.root([])


def test_hashes_can_be_extended_piecemeal():
    hasher, found = BlockHasher(SIZE, b"k"), []
    tokens = list(range(16))
    for num_blocks in (0, 1, 3, 3, 4):
        hasher.extend(hasher.root([]), found, tokens, num_blocks)
    assert found == hashes(tokens)


def test_a_prompt_is_hashed_once_for_completions_that_come_one_after_another(monkeypatch):
    cache = PrefixCache(BlockHasher(SIZE, b"k"), [BlockPool(8)], [None])
    prompt, hashed = list(range(16)), []
    extend = BlockHasher.extend

    def counting(self, root, found, token_ids, num_blocks):
        hashed.append(num_blocks)
        extend(self, root, found, token_ids, num_blocks)

    monkeypatch.setattr(BlockHasher, "extend", counting)
    found = []
    for salt in (None, None, "x", "x", None):
        message = request("r", [], salt=salt)
        message.prompt_token_ids = prompt
        each = Request(message, sequence=0, max_total_tokens=NEVER, num_groups=1)
        cache.open(each)
        found.append(each.block_hashes)
    assert hashed == [4, 4, 4]
    assert found[0] == found[1] == found[4] == hashes(prompt)
    assert found[2] == found[3] == hashes(prompt, [("salt", "x")])
    assert len({id(each) for each in found}) == 5


def test_two_kinds_of_extra_keys_never_collide():
    lists = [
        [],
        [("salt", "x")],
        [("tenant", "x")],
        [("lora", "x")],
        [("salt", "")],
        [("salt", "x"), ("tenant", "y")],
        [("salt", "xtenanty")],
        [("salt", "x\x00tenant"), ("", "y")],
        [("sal", "tx")],
    ]
    roots = {BlockHasher(SIZE, b"k").root(keys) for keys in lists}
    assert len(roots) == len(lists)


def test_salt_and_tenant_are_tagged_with_their_kind():
    assert extra_keys(request("r", [1])) == []
    assert extra_keys(request("r", [1], salt="")) == [("salt", "")]
    assert extra_keys(request("r", [1], salt="x", tenant="y")) == [("salt", "x"), ("tenant", "y")]


@pytest.mark.parametrize(("position", "window", "first"), [(0, 4, 0), (6, 4, 0), (7, 4, 1), (9, 6, 1), (99, None, 0)])
def test_a_window_starts_at_the_block_of_the_first_token_that_is_seen(position, window, first):
    assert window_start(position, window, SIZE) == first
    if window is not None:
        seen = max(0, position - window + 1)
        assert first * SIZE <= seen < (first + 1) * SIZE


def cache_with(windows: list[int | None], present: list[set[int]], num_tokens: int) -> tuple[PrefixCache, Request]:
    """A cache in which each group holds the given blocks of the request's text."""
    pools = [BlockPool(32) for _ in windows]
    cache = PrefixCache(BlockHasher(SIZE, b"k"), pools, windows)
    asking = make_request(num_tokens, len(windows))
    cache.open(asking)
    for pool, indices in zip(pools, present, strict=True):
        blocks = pool.allocate(len(indices))
        for block, index in zip(blocks, sorted(indices), strict=True):
            pool.publish(block, asking.block_hashes[index])
    return cache, asking


@pytest.mark.parametrize(
    ("windows", "present", "num_tokens", "length"),
    [
        ([None], [{0, 1, 2, 3}], 17, 4),
        ([None], [{0, 1, 2, 3}], 16, 3),  # the last token is always computed
        ([None], [{0, 1, 3}], 17, 2),
        ([None], [{1, 2, 3}], 17, 0),
        ([None], [set()], 17, 0),
        ([5], [{3}], 17, 4),  # position 16 sees 12..16: block 3 is enough
        ([6], [{3}], 17, 0),  # it sees 11..16
        ([6], [{2, 3}], 17, 4),
        ([6], [{1, 2}], 17, 3),  # the longest has a gap, a shorter one has none
        ([6], [{0, 3}], 17, 1),
        ([None, 5], [{0, 1, 2, 3}, {1, 2}], 17, 3),
        ([None, 5], [{0, 1}, {3}], 17, 0),
        ([5, 9], [{1, 3}, {0, 1, 2, 3}], 17, 4),
        ([5, 9], [{0, 3}, {0, 2}], 17, 1),  # 4 for the first; the second allows 1, which the first has too
        ([5, 9], [{1, 3}, {0}], 17, 0),  # 4, then 1, then 0
    ],
)
def test_the_longest_prefix_that_every_group_can_go_on_from(windows, present, num_tokens, length):
    cache, asking = cache_with(windows, present, num_tokens)
    tables = cache.match(asking)
    for table, window, indices in zip(tables, windows, present, strict=True):
        assert len(table) == length
        first = window_start(length * SIZE, window, SIZE)
        assert all(block is NULL_BLOCK for block in table[:first])
        assert all(block is not NULL_BLOCK for block in table[first:])
        assert set(range(first, length)) <= indices


def test_a_request_for_prompt_logprobs_reads_nothing():
    cache, asking = cache_with([None], [{0, 1}], 9)
    assert len(cache.match(asking)[0]) == 2
    assert cache.match(make_request(9, prompt_logprobs=0)) == [[]]


def test_without_a_cache_nothing_is_hashed_or_found():
    asking = make_request(9, num_groups=2)
    cache = NoPrefixCache()
    cache.open(asking)
    assert asking.block_hashes == []
    assert cache.match(asking) == [[], []]
