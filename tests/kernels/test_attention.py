"""Paged attention against float64, and its promise that load, chunks and physical blocks never change a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagemill import _native
from tests.kernels.paged import PagedCache, Shape, assert_attends, assert_holds, attend

SHAPES = [
    Shape(),
    Shape(heads=4, kv_heads=4, dim=32),
    Shape(heads=8, kv_heads=1, dim=128, block_size=32),
    Shape(heads=32, kv_heads=1, dim=16),
    Shape(heads=3, kv_heads=3, dim=80, block_size=64),
    Shape(heads=2, kv_heads=1, dim=8),
    Shape(heads=2, kv_heads=2, dim=5),
    Shape(heads=4, kv_heads=2, dim=256),
    Shape(window=20),
    Shape(window=300, dim=48),
    Shape(softcap=5.0, scale=0.5),
    Shape(kv="i8"),
    Shape(kv="i8", heads=9, kv_heads=3, block_size=32),
    Shape(kv="i8", heads=8, kv_heads=1, dim=128, window=40),
    Shape(kv="i8", heads=3, kv_heads=3, dim=80),
    Shape(kv="i8", heads=2, kv_heads=2, dim=5, softcap=5.0),
    Shape(kv="i8", heads=4, kv_heads=2, dim=256, window=300),
    Shape(kv="f32"),
    Shape(kv="f32", heads=5, kv_heads=1, dim=96, window=17, softcap=30.0),
]


def make_qkv(shape: Shape, n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(n, (shape.heads + 2 * shape.kv_heads) * shape.dim, generator=generator)


def queries_of(shape: Shape, qkv: torch.Tensor) -> torch.Tensor:
    return qkv[:, : shape.heads * shape.dim]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(isa: str, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 15, 16, 17, 33, 255, 256, 257, 600]
    whole = [make_qkv(shape, n, generator) for n in lengths]
    first = [[n - 1, 0, n // 2][row % 3] for row, n in enumerate(lengths)]
    cache = PagedCache(shape, lengths, generator)
    for row, qkv in enumerate(whole):
        cache.write(row, 0, qkv)
        assert_holds(shape, cache, row, qkv)
    queries = [queries_of(shape, qkv)[at:] for qkv, at in zip(whole, first, strict=True)]
    for row, got in enumerate(attend(shape, cache, queries, list(range(len(lengths))), lengths)):
        assert_attends(shape, cache, row, whole[row], first[row], got)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(window=40, kv="f32"),
        Shape(heads=8, kv_heads=1, dim=40, softcap=9.0),
        Shape(kv="i8"),
        Shape(kv="i8", heads=8, kv_heads=1, dim=24, window=40),
    ],
    ids=str,
)
def test_bytes_do_not_depend_on_load(isa: str, shape: Shape, threads: None) -> None:
    """Whole prompt, chunks of 1, 7 and 64, neighbours, other blocks, 1 and 2 threads: one answer."""
    n = 530
    qkv = make_qkv(shape, n, torch.Generator().manual_seed(2))
    noise = torch.Generator().manual_seed(3)

    def run(chunk: int, num_threads: int, neighbours: list[int], seed: int) -> torch.Tensor:
        _native.set_num_threads(num_threads)
        cache = PagedCache(shape, [*neighbours, n], torch.Generator().manual_seed(seed))
        others = [make_qkv(shape, k, noise) for k in neighbours]
        for row, other in enumerate(others):
            cache.write(row, 0, other)
        parts = []
        for start in range(0, n, chunk):
            stop = min(n, start + chunk)
            cache.write(len(neighbours), start, qkv[start:stop])
            queries = [*(queries_of(shape, o)[-3:] for o in others), queries_of(shape, qkv)[start:stop]]
            contexts = [*neighbours, stop]
            parts.append(attend(shape, cache, queries, list(range(len(contexts))), contexts)[-1])
        return torch.cat(parts)

    alone = run(n, 1, [], 0)
    assert torch.isfinite(alone).all()
    for chunk, num_threads, neighbours, seed in [
        (1, 2, [], 1),
        (7, 1, [5, 300], 2),
        (64, 2, [700], 3),
        (n, 2, [9] * 20, 4),
    ]:
        assert torch.equal(alone, run(chunk, num_threads, neighbours, seed)), (chunk, num_threads, neighbours)


@pytest.mark.parametrize("kv", ["bf16", "i8"])
def test_split_context_gives_the_same_bytes(isa: str, threads: None, kv: str) -> None:
    """One long decode is cut over the threads; one thread walks it in a row."""
    shape = Shape(heads=3, kv_heads=1, kv=kv)
    generator = torch.Generator().manual_seed(4)
    cache = PagedCache(shape, [3000], generator)
    qkv = make_qkv(shape, 3000, generator)
    cache.write(0, 0, qkv)
    results = []
    for num_threads in (1, 2, 3):
        _native.set_num_threads(num_threads)
        results.append(attend(shape, cache, [queries_of(shape, qkv)[-1:]], [0], [3000])[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kv", ["bf16", "f32", "i8"])
@pytest.mark.parametrize("part", ["all", "values"])
def test_a_broken_neighbour_stays_alone(isa: str, kv: str, part: str) -> None:
    """NaN in one request's keys and values leaves the other's bytes as they were, and shows in its own."""
    shape = Shape(kv=kv)
    generator = torch.Generator().manual_seed(5)
    good = make_qkv(shape, 45, generator)
    bad = make_qkv(shape, 45, generator)
    bad[:, 0 if part == "all" else -shape.kv_heads * shape.dim :] = float("nan")
    cache = PagedCache(shape, [45, 45], generator)
    cache.write(0, 0, good)
    cache.write(1, 0, bad)
    alone = attend(shape, cache, [queries_of(shape, good)], [0], [45])[0]
    both = attend(shape, cache, [queries_of(shape, good), queries_of(shape, bad)], [0, 1], [45, 45])
    assert torch.equal(alone, both[0])
    assert both[1].isnan().all()


@pytest.mark.parametrize("shape", [Shape(heads=9, kv_heads=3, kv="i8"), Shape(window=70)], ids=str)
def test_ranks_that_take_each_others_requests(isa: str, threads: None, shape: Shape) -> None:
    """More ranks than cores: one that has its share done takes what others have not begun, wherever it lies."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, 600, (24,), generator=generator).tolist()
    cache = PagedCache(shape, lengths, generator)
    whole = [make_qkv(shape, n, generator) for n in lengths]
    for row, qkv in enumerate(whole):
        cache.write(row, 0, qkv)
    queries = [queries_of(shape, qkv)[-1:] for qkv in whole]
    alone = [attend(shape, cache, [query], [i], [lengths[i]])[0] for i, query in enumerate(queries)]
    for num_threads in (2, 3, 5):
        _native.set_num_threads(num_threads)
        for _ in range(40):
            together = attend(shape, cache, queries, list(range(len(lengths))), lengths)
            assert torch.equal(torch.cat(together), torch.cat(alone)), num_threads


def shared_cache(
    shape: Shape, requests: list[tuple[int, int, int]], generator: torch.Generator
) -> tuple[PagedCache, list[torch.Tensor], list[int]]:
    """Of requests (the one it begins like, blocks shared with it, own tokens): the cache, their rows and lengths."""
    rows: list[torch.Tensor] = []
    shares: list[tuple[int, int]] = []
    for parent, blocks, own in requests:
        like = rows[parent % len(rows)] if rows else torch.empty(0, (shape.heads + 2 * shape.kv_heads) * shape.dim)
        blocks = min(blocks, len(like) // shape.block_size)
        rows.append(torch.cat([like[: blocks * shape.block_size], make_qkv(shape, own, generator)]))
        shares.append((parent % max(1, len(rows) - 1), blocks))
    lengths = [len(row) for row in rows]
    cache = PagedCache(shape, lengths, generator)
    for row, (parent, blocks) in enumerate(shares):
        cache.tables[row, :blocks] = cache.tables[parent, :blocks]
        cache.write(row, blocks * shape.block_size, rows[row][blocks * shape.block_size :])
    return cache, rows, lengths


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=9, kv_heads=3, kv="i8"),
        Shape(heads=4, kv_heads=2, kv="bf16", block_size=48),
        Shape(heads=5, kv_heads=1, kv="f32", dim=24, softcap=8.0),
        Shape(heads=32, kv_heads=1, kv="i8", dim=16),
        Shape(heads=4, kv_heads=2, kv="i8", window=300),
    ],
    ids=str,
)
def test_requests_that_share_a_prefix_get_the_bytes_they_get_alone(
    isa: str, threads: None, shape: Shape, num_threads: int
) -> None:
    """Most begin alike for two tiles, some for longer, one by less than a tile; two are chunks."""
    generator = torch.Generator().manual_seed(7)
    tile = -(-256 // shape.block_size)
    requests = [(0, 0, 560), (0, 2 * tile, 1), (0, 2 * tile, 40), (0, 2 * tile + 1, 300), (3, 3 * tile, 17)]
    requests += [(4, 3 * tile, 5), (0, tile - 1, 260), (0, 0, 9), *[(0, 2 * tile, 20 + i) for i in range(5)]]
    cache, rows, lengths = shared_cache(shape, requests, generator)
    new = [1] * len(rows)
    new[2], new[8] = 7, 20
    queries = [queries_of(shape, row)[-n:] for row, n in zip(rows, new, strict=True)]
    _native.set_num_threads(1)
    alone = [attend(shape, cache, [query], [i], [lengths[i]])[0] for i, query in enumerate(queries)]
    _native.set_num_threads(num_threads)
    order = torch.randperm(len(rows), generator=generator).tolist()
    together = attend(shape, cache, [queries[i] for i in order], order, [lengths[i] for i in order])
    for i, got in zip(order, together, strict=True):
        assert torch.equal(got, alone[i]), i


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 2),
    groups_per_block=st.integers(1, 3),
    kv=st.sampled_from(["bf16", "f32", "i8"]),
    num_threads=st.integers(1, 3),
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(1, 400)), min_size=2, max_size=16),
)
def test_fuzz_of_shared_prefixes(
    seed: int, group: int, kv_heads: int, groups_per_block: int, kv: str, num_threads: int,
    requests: list[tuple[int, int, int]],
) -> None:  # fmt: skip
    """Trees of prefixes: nobody's bytes depend on who begins alike."""
    shape = Shape(heads=group * kv_heads, kv_heads=kv_heads, dim=16, block_size=16 * groups_per_block, kv=kv)
    cache, rows, lengths = shared_cache(shape, requests, torch.Generator().manual_seed(seed))
    queries = [queries_of(shape, row)[-1:] for row in rows]
    before = _native.num_threads()
    try:
        _native.set_num_threads(num_threads)
        together = attend(shape, cache, queries, list(range(len(rows))), lengths)
        for i, query in enumerate(queries):
            assert torch.equal(together[i], attend(shape, cache, [query], [i], [lengths[i]])[0])
    finally:
        _native.set_num_threads(before)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any layer: heads of any size, also odd ones, groups that fill no vector, windows, soft caps, KV types."""
    kv_heads = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    return Shape(
        heads=kv_heads * draw(st.integers(1, 9)),
        kv_heads=kv_heads,
        dim=draw(st.one_of(st.integers(1, 70), st.sampled_from([80, 96, 100, 127, 128, 129, 255, 256]))),
        block_size=16 * draw(st.integers(1, 3)),
        kv=draw(st.sampled_from(["bf16", "f32", "i8"])),
        window=draw(st.one_of(st.just(0), st.integers(1, 90))) if causal else 0,
        softcap=draw(st.sampled_from([0.0, 2.0, 30.0])),
        causal=causal,
        scale=draw(st.sampled_from([0.0, 0.25])),
    )


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**31),
    shape=shapes(),
    requests=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=5),
    shared=st.integers(0, 8),
    isa_name=st.sampled_from(_native.available_isas()),
    num_threads=st.integers(1, 3),
)
def test_any_batch_over_scattered_and_shared_blocks(
    threads: None,
    seed: int,
    shape: Shape,
    requests: list[tuple[int, int]],
    shared: int,
    isa_name: str,
    num_threads: int,
) -> None:
    """Near the reference; and each request alone, in other blocks and on one thread, gives the same bytes."""
    before = _native.isa()
    _native.set_isa(isa_name)
    try:
        generator = torch.Generator().manual_seed(seed)
        lengths = [n for n, _ in requests]
        whole = [make_qkv(shape, n, generator) for n in lengths]
        first = [max(0, n - tail) for n, tail in requests]
        same = min(shared, min(lengths) // shape.block_size) if shape.causal else 0  # blocks that all begin with
        for qkv in whole[1:]:
            qkv[: same * shape.block_size] = whole[0][: same * shape.block_size]
        queries = [queries_of(shape, qkv)[at:] for qkv, at in zip(whole, first, strict=True)]
        cache = scattered(shape, whole, generator, same)
        for row, at in enumerate(first):
            free_behind_window(shape, cache, row, at)
        _native.set_num_threads(num_threads)
        together = attend(shape, cache, queries, list(range(len(lengths))), lengths)
        _native.set_num_threads(1)
        for i, got in enumerate(together):
            elsewhere = scattered(shape, whole[i : i + 1], generator, 0)
            assert_holds(shape, elsewhere, 0, whole[i])
            assert_attends(shape, elsewhere, 0, whole[i], first[i], got)
            assert torch.equal(got, attend(shape, elsewhere, queries[i : i + 1], [0], lengths[i : i + 1])[0])
    finally:
        _native.set_isa(before)


def scattered(shape: Shape, whole: list[torch.Tensor], generator: torch.Generator, same: int) -> PagedCache:
    """The requests' keys and values, written in two pieces each; the first blocks of all are the same ones."""
    cache = PagedCache(shape, [qkv.shape[0] for qkv in whole], generator)
    cache.tables[1:, :same] = cache.tables[0, :same]
    for row, qkv in enumerate(whole):
        at = same * shape.block_size if row else 0  # the first row writes for all
        middle = at + int(torch.randint(len(qkv) - at + 1, (1,), generator=generator))
        for start, stop in ((at, middle), (middle, len(qkv))):
            cache.write(row, start, qkv[start:stop])
    return cache


def free_behind_window(shape: Shape, cache: PagedCache, row: int, first: int) -> None:
    """A request no longer holds the blocks that lie behind the window of its first query."""
    if shape.window:
        cache.tables[row, : max(0, first - shape.window + 1) // shape.block_size] = -1


@pytest.mark.parametrize("kv", ["bf16", "f32", "i8"])
def test_no_requests(isa: str, kv: str) -> None:
    shape = Shape(kv=kv)
    cache = PagedCache(shape, [20], torch.Generator().manual_seed(6))
    assert attend(shape, cache, [], [], []) == []
    cache.write(0, 0, torch.empty(0, (shape.heads + 2 * shape.kv_heads) * shape.dim))
    assert (cache.data == 0xFF).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"block": 99}, "block that does not exist"), ({"context": 400}, "longer than its block table")],
)
def test_indices_are_checked(change: dict[str, int], message: str) -> None:
    shape = Shape()
    cache = PagedCache(shape, [20], torch.Generator().manual_seed(6))
    cache.tables[0, 1] = change.get("block", cache.tables[0, 1])
    with pytest.raises(ValueError, match=message):
        attend(shape, cache, [torch.zeros(1, shape.heads * shape.dim)], [0], [change.get("context", 20)])


def test_the_number_of_threads_may_change_meanwhile(changing_threads: None) -> None:
    """Of the ranks of a larger team some would have no memory. Long heads: it takes a while to lay out."""
    shape = Shape(heads=1, kv_heads=1, dim=8192, kv="f32")
    lengths = [20] * 6
    cache = PagedCache(shape, lengths, torch.Generator().manual_seed(7))
    qkv = make_qkv(shape, 20, torch.Generator().manual_seed(8))
    for row in range(6):
        cache.write(row, 0, qkv)
    queries, rows = [queries_of(shape, qkv)[-1:]] * 6, list(range(6))
    want = attend(shape, cache, queries, rows, lengths)
    held = cache.data.clone()
    for _ in range(150):
        assert all(map(torch.equal, attend(shape, cache, queries, rows, lengths), want))
        cache.write(0, 0, qkv)
    assert torch.equal(cache.data, held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads is 3; it must be a multiple of num_kv_heads, which is 2"),
        ({"head_dim": 1 << 30}, "head_dim is 1073741824 for 6 heads"),
        ({"block_size": 24}, "block_size is 24; it must be a multiple of 16"),
        ({"kv_type": 3}, "kv_type is 3"),
        ({"scale": 0.0}, "scale is 0"),
        ({"softcap": float("nan")}, "softcap nan"),
    ],
)
def test_a_layer_that_the_kernels_do_not_have_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.AttentionLayer(**Shape().kernel | {"scale": 1.0} | change)


@pytest.mark.parametrize("size", [(64, 1, 16), (64, 2, 33)])
def test_a_rotary_table_of_another_shape_is_an_error(size: tuple[int, int, int]) -> None:
    """It would be read past its end."""
    shape = Shape()
    cache = PagedCache(shape, [20], torch.Generator().manual_seed(6))
    qkv, ints = make_qkv(shape, 4, torch.Generator().manual_seed(6)), torch.arange(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"the rotary table is \[64, .*it must be \[positions, 2, rotary_dim / 2\]"):
        _native.rope_and_cache(qkv, cache.data, ints, ints, torch.zeros(size), **shape.kernel)
