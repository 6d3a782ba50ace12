"""Random paged batches, what their blocks hold, and plain float64 answers with a bound on how far a kernel may be off.

The bounds are derived, not measured: each rounding that the kernel is allowed is followed to the output. So a fuzz over
any shape, scale and soft cap holds every element to what its own numbers explain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from pagemill import _native
from pagemill.kernels.reference import hadamard

KV_TYPES = {"bf16": 0, "f32": 1, "i8": 2}
GROUP = 16  # tokens whose words lie side by side in a block
TILE = 256  # positions whose probabilities are rounded on one scale

UNIT = 2.0**-24
"""Relative error of one float32 rounding."""

NEAR_TIE = 1e-3
"""A byte whose exact value lies so near the middle of two may be either. The kernel's Hadamard transform and division
round a value of up to 127 steps about log2(dim) + 4 times: 127 * 12 * UNIT = 1e-4 steps."""


@dataclass(kw_only=True)
class Shape:
    """A layer's attention."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    kv: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    scale: float = field(default=0.0)

    def __post_init__(self) -> None:
        self.scale = self.scale or 1 / math.sqrt(self.dim)

    @property
    def kernel(self) -> dict:
        """Keywords shared by the native ops."""
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "block_size": self.block_size,
            "kv_type": KV_TYPES[self.kv],
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _native.kv_block_bytes(KV_TYPES[self.kv], self.block_size, self.kv_heads, self.dim)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [n, heads, dim], keys and values [n, kv_heads, dim]."""
        heads = qkv.view(qkv.shape[0], -1, self.dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Each head through the Hadamard transform that keys and queries in bytes go through: float64."""
        block = self.dim & -self.dim
        matrix = hadamard(torch.eye(block), block).double().sign() / math.sqrt(block)
        return (x.double().reshape(-1, block) @ matrix).view(x.shape)


class PagedCache:
    """Requests' keys and values in blocks drawn in random order; every unused byte is NaN."""

    def __init__(self, shape: Shape, lengths: list[int], generator: torch.Generator, spare: int = 3) -> None:
        self.shape, self.lengths = shape, lengths
        per_request = [-(-n // shape.block_size) for n in lengths]
        num_blocks = sum(per_request) + spare
        order = torch.randperm(num_blocks, generator=generator)
        self.data = torch.full((num_blocks, shape.block_bytes), 0xFF, dtype=torch.uint8)
        self.tables = torch.full((len(lengths), max(per_request) + 1), -1, dtype=torch.int32)
        at = 0
        for row, count in enumerate(per_request):
            self.tables[row, :count] = order[at : at + count]
            at += count

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Slots of positions [start, stop) of a request."""
        at = torch.arange(start, stop)
        block = self.tables[row, at // self.shape.block_size].long()
        return (block * self.shape.block_size + at % self.shape.block_size).to(torch.int32)

    def write(self, row: int, start: int, qkv: torch.Tensor) -> None:
        """Write the key and value parts of qkv at positions from start on."""
        n = qkv.shape[0]
        _native.rope_and_cache(
            qkv.clone(),
            self.data,
            torch.arange(start, start + n, dtype=torch.int32),
            self.slots(row, start, start + n),
            None,
            **self.shape.kernel,
        )

    def read(self, row: int) -> Held:
        """A request's keys and values, out of the layout that csrc/ops/attention.h describes."""
        shape, n = self.shape, self.lengths[row]
        dim, heads, padded = shape.dim, shape.kv_heads, -(-shape.dim // 16) * 16
        per_word = {"f32": 1, "bf16": 2, "i8": 4}[shape.kv]
        key_words = -(-dim // per_word) * GROUP
        value_words = {"f32": 16, "bf16": 8, "i8": 4}[shape.kv] * padded
        blocks = self.data[self.tables[row, : -(-n // shape.block_size)].long()].view(torch.int32)
        groups = blocks.view(len(blocks), heads, shape.block_size // GROUP, -1).transpose(1, 2).flatten(0, 1)
        keys, values, scales = groups.split([key_words, value_words, groups.shape[-1] - key_words - value_words], -1)
        keys = keys.reshape(len(groups), heads, -1, GROUP).transpose(2, 3)  # [groups, heads, 16, words]
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.uint8}[shape.kv]
        keys = (
            keys.clone(memory_format=torch.contiguous_format)
            .view(kind)
            .double()
            .transpose(1, 2)
            .flatten(0, 1)[:n, :, :dim]
        )
        pair = 1 if shape.kv == "f32" else 2  # tokens whose values share a word
        kind = torch.int8 if shape.kv == "i8" else kind
        values = values.contiguous().view(kind).view(len(groups), heads, GROUP // pair, padded, pair)
        values = values.permute(0, 2, 4, 1, 3).reshape(-1, heads, padded)[:n, :, :dim].double()
        if shape.kv != "i8":
            return Held(keys, values)
        scales = scales.contiguous().view(torch.bfloat16).view(len(groups), heads, 2, GROUP).double()
        key_scale, value_scale = scales.permute(2, 0, 3, 1).reshape(2, -1, heads)[:, :n]
        return Held(keys - 128, values, key_scale, value_scale)


@dataclass(kw_only=False)
class Held:
    """What the cache holds of a request, float64: numbers, or steps of a scale; keys in bytes are turned."""

    keys: torch.Tensor  # [n, kv_heads, dim]
    values: torch.Tensor  # [n, kv_heads, dim]
    key_scale: torch.Tensor | None = None  # [n, kv_heads]
    value_scale: torch.Tensor | None = None  # [n, kv_heads]


def assert_holds(shape: Shape, cache: PagedCache, row: int, qkv: torch.Tensor) -> None:
    """Floats are kept exactly as their type has them, bytes to half a step of a scale that is one of bfloat16."""
    held, (_, keys, values) = cache.read(row), shape.split(qkv)
    if held.key_scale is None or held.value_scale is None:
        kind = torch.float32 if shape.kv == "f32" else torch.bfloat16
        assert torch.equal(held.keys, keys.to(kind).double())
        assert torch.equal(held.values, values.to(kind).double())
        return
    for steps, scale, x in (
        (held.keys, held.key_scale, shape.turned(keys)),
        (held.values, held.value_scale, values.double()),
    ):
        least = x.abs().amax(-1) / 127
        assert ((scale >= least * (1 - 1e-6)) & (scale <= least * (1 + 2**-7 + 1e-6))).all()
        assert ((steps - x / scale[..., None]).abs() <= 0.5 + NEAR_TIE).all()


def attend(
    shape: Shape, cache: PagedCache, queries: list[torch.Tensor], rows: list[int], contexts: list[int]
) -> list[torch.Tensor]:
    """Run the kernel on one batch: queries[i] are the last queries of request rows[i] at contexts[i]."""
    starts = torch.tensor([0, *accumulate(q.shape[0] for q in queries)], dtype=torch.int32)
    query = torch.cat(queries).contiguous() if queries else torch.empty(0, shape.heads * shape.dim)
    out = torch.full((query.shape[0], shape.heads * shape.dim), float("nan"))
    _native.attention(
        query,
        cache.data,
        starts,
        torch.tensor(contexts, dtype=torch.int32),
        cache.tables[rows].contiguous(),
        out,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        causal=shape.causal,
        **shape.kernel,
    )
    return list(out.split([q.shape[0] for q in queries]))


def assert_attends(shape: Shape, cache: PagedCache, row: int, qkv: torch.Tensor, first: int, got: torch.Tensor) -> None:
    """got: outputs [n - first, heads * dim] of positions >= first of a request whose queries are those of qkv."""
    want, bound = reference(shape, cache.read(row), shape.split(qkv)[0], first)
    over = (got.double() - want).abs() / bound
    assert over.max() <= 1, f"an element is {over.max():.3g} times as far off as its rounding explains"


def reference(shape: Shape, held: Held, queries: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of positions >= first over what is held, and how far off a kernel may be: [n - first, heads * dim]."""
    n, group = len(held.keys), shape.heads // shape.kv_heads

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).repeat_interleave(group, 0)  # [n, kv_heads, ...] -> [heads, n, ...]

    keys, values = of_heads(held.keys), of_heads(held.values)
    at, key = torch.arange(first, n)[:, None], torch.arange(n)[None, :]
    seen = (key <= at) | (not shape.causal)
    if shape.window:
        seen &= key > at - shape.window
    products, slack = _products(shape, queries[first:].transpose(0, 1), keys)
    if held.key_scale is not None:
        by = of_heads(held.key_scale)[:, None, :]
        products, slack = products * by, slack * by
    scores, slack = products * shape.scale, slack * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True)
    # Scaling by log2 e and by the keys' scales, the shift by the tile's maximum, exp2, tanh: some roundings of each.
    slack = slack + 8 * UNIT * (scores.abs().masked_fill(~seen, 0) + top.abs() + shape.softcap + 1)
    p = scores.softmax(-1)
    numbers = values if held.value_scale is None else values * of_heads(held.value_scale)[..., None]
    out = p @ numbers
    # With scores off by e_j the output is off by sum p_j (exp(e_j) - 1) (v_j - out) / sum p_j exp(e_j).
    grown = p * torch.expm1(slack)
    bound = (grown @ numbers.abs() + grown.sum(-1, keepdim=True) * out.abs()) / (p * torch.exp(-slack)).sum(
        -1, keepdim=True
    )
    bound = bound + 2 * (TILE + n / TILE) * UNIT * (p @ numbers.abs())  # the sums of a tile, and over tiles
    if shape.kv == "bf16":
        bound = bound + 2**-8 * (p @ numbers.abs())  # each probability has 8 bits
    if held.value_scale is not None:
        bound = bound + _steps_of_probabilities(p, of_heads(held.value_scale)[:, None, :], values, seen)
    flat = (x.transpose(0, 1).reshape(n - first, shape.heads * shape.dim) for x in (out, bound + 1e-12))
    want, off = flat
    return want, off


def _products(shape: Shape, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """queries [heads, m, dim] times keys [heads, n, dim], and how far off they may be."""
    if shape.kv != "i8":
        q = queries.double() if shape.kv == "f32" else queries.bfloat16().double()
        return q @ keys.mT, (shape.dim + 2) * UNIT * (q.abs() @ keys.abs().mT)  # float32 sums
    turned = shape.turned(queries)
    scale = turned.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    steps = turned / scale
    near = ((steps - steps.floor() - 0.5).abs() < NEAR_TIE).double()
    # Bytes, summed as integers: off only where a byte may be its neighbour.
    return scale * (steps.round() @ keys.mT), scale * (near @ keys.abs().mT)


def _steps_of_probabilities(
    p: torch.Tensor, value_scale: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """What rounding costs: in each tile a probability times its value's scale is a whole number of 1 / 32767 of the
    largest scale times the largest probability. One that is less than half a step is lost."""
    total = torch.zeros_like(p[..., :1])
    for start in range(0, p.shape[-1], TILE):
        tile = slice(start, start + TILE)
        weight = p[..., tile] * value_scale[..., tile]
        largest = value_scale[..., tile].expand_as(weight).masked_fill(~seen[:, tile], 0).amax(-1, keepdim=True)
        step = largest / 32767 * p[..., tile].amax(-1, keepdim=True)
        total = total + torch.minimum(weight, step / 2 * (1 + NEAR_TIE)) @ values[:, tile].abs()
    return total
