"""Random paged batches and their plain PyTorch answers, for the attention tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from pagemill import _native
from pagemill.kernels.reference import from_bytes, hadamard, to_bytes

KV_TYPES = {"bf16": 0, "f32": 1, "i8": 2}


@dataclass(kw_only=True)
class Shape:
    """A layer's attention, and the tolerance that its KV type allows."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    kv: str = "bf16"
    window: int = 0
    softcap: float = 0.0
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


def attend(
    shape: Shape, cache: PagedCache, queries: list[torch.Tensor], rows: list[int], contexts: list[int]
) -> list[torch.Tensor]:
    """Run the kernel on one batch: queries[i] are the last queries of request rows[i] at contexts[i]."""
    starts = torch.tensor([0, *torch.tensor([q.shape[0] for q in queries]).cumsum(0).tolist()], dtype=torch.int32)
    query = torch.cat(queries).contiguous()
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
        **shape.kernel,
    )
    return list(out.split([q.shape[0] for q in queries]))


def cached_in_bytes(x: torch.Tensor, dim: int, *, rotate: bool) -> torch.Tensor:
    """What the cache holds of each head of x [n, heads * dim] in eight bits."""
    heads = x.reshape(-1, dim)
    if not rotate:
        return from_bytes(*to_bytes(heads)).view(x.shape)
    block = dim & -dim
    return hadamard(from_bytes(*to_bytes(hadamard(heads, block))), block).view(x.shape)


def query_in_bytes(x: torch.Tensor, dim: int) -> torch.Tensor:
    """What the kernel keeps of each query head in eight bits; its scale is not rounded."""
    heads = hadamard(x.reshape(-1, dim), dim & -dim)
    scale = heads.abs().amax(-1, keepdim=True) / 127
    return hadamard((heads / scale).round() * scale, dim & -dim).view(x.shape)


def reference(shape: Shape, qkv: torch.Tensor, first: int) -> torch.Tensor:
    """Attention of positions >= first of one request, whole keys and values at hand, in float64."""
    n, dim = qkv.shape[0], shape.dim
    q, k, v = qkv.split([shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim], dim=1)
    if shape.kv == "bf16":
        q, k, v = (t.bfloat16() for t in (q, k, v))
    if shape.kv == "i8":
        q, k, v = query_in_bytes(q, dim), cached_in_bytes(k, dim, rotate=True), cached_in_bytes(v, dim, rotate=False)
    group = shape.heads // shape.kv_heads
    q = q.double().view(n, shape.heads, dim)[first:].transpose(0, 1)
    k = k.double().view(n, shape.kv_heads, dim).transpose(0, 1).repeat_interleave(group, 0)
    v = v.double().view(n, shape.kv_heads, dim).transpose(0, 1).repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    at, key = torch.arange(first, n)[:, None], torch.arange(n)[None, :]
    seen = key <= at
    if shape.window:
        seen &= key > at - shape.window
    scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n - first, shape.heads * dim).float()
