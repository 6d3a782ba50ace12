"""Paged attention against the machine's own ceilings, measured in the same run.

    python benchmarks/attention.py [--isa avx2] [--threads 2] [--block-size 32] [--kv i8] [--json out.json]

Prefill is set against the dot-product ceiling (only products that the causal mask needs count), decoding against the
speed of reading memory: keys and values are taken in turn from as many caches as keep them out of all caches.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pagemill import _native
from pagemill.bench import report

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen3-0.6B": (16, 8, 128)}
"""Model -> (query heads, KV heads, head_dim)."""
WORK = {
    "decode 1 x 250": [(250, 1)],
    "decode 64 x 250": [(250, 1)] * 64,
    "decode 64 x 64..512": [(64 + 7 * i, 1) for i in range(64)],
    "decode 16 x 64..512": [(64 + 28 * i, 1) for i in range(16)],
    "decode 1 x 4000": [(4000, 1)],
    "decode 32 on 1024": [(1072, 1)] * 32,
    "prefill 8 x 128": [(128, 128)] * 8,
    "prefill 512": [(512, 512)],
    "prefill 1024": [(1024, 1024)],
    "chunk of 64 at 2000": [(2064, 64)],
}
"""Name -> (context, new tokens) of each request."""
SHARED = {"decode 32 on 1024": 1024}
"""Tokens that all requests have in common, in the same blocks."""
COLD_BYTES = 128 << 20
"""Keys and values that no cache holds."""
KV_TYPES = {"bf16": 0, "f32": 1, "i8": 2}


def measure(
    model: str, work: str, block_size: int, kv: str, seconds: float, ceilings: dict[str, float]
) -> dict[str, Any]:
    """One kind of work: JSON with time, rates and shares of the ceilings."""
    heads, kv_heads, dim = SHAPES[model]
    requests = WORK[work]
    kv_type = KV_TYPES[kv]
    per_row = -(-max(context for context, _ in requests) // block_size)
    shared = SHARED.get(work, 0) // block_size
    num_blocks = shared + (per_row - shared) * len(requests)
    blocks = torch.randperm(num_blocks, dtype=torch.int32)
    own = blocks[shared:].view(len(requests), per_row - shared)
    tables = torch.cat([blocks[:shared].expand(len(requests), shared), own], dim=1)
    block_bytes = _native.kv_block_bytes(kv_type, block_size, kv_heads, dim)
    copies = max(1, min(32, -(-COLD_BYTES // (num_blocks * block_bytes)))) if requests[0][1] == 1 else 1
    caches = [torch.from_numpy(_native.allocate_bytes(num_blocks, block_bytes)) for _ in range(copies)]  # as the engine
    for cache in caches:
        cache.fill_(0)  # its pages are the system's one page of zeros until something is written
    new = torch.tensor([count for _, count in requests])
    starts = torch.cat([torch.zeros(1), new.cumsum(0)]).int()
    contexts = torch.tensor([context for context, _ in requests], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), heads * dim)
    out = torch.empty_like(query)
    best, end, runs = math.inf, time.perf_counter() + seconds, 0
    while runs < 2 * copies or time.perf_counter() < end:
        start = time.perf_counter()
        _native.attention(
            query, caches[runs % copies], starts, contexts, tables, out, num_heads=heads, num_kv_heads=kv_heads,
            head_dim=dim, block_size=block_size, scale=dim**-0.5, kv_type=kv_type,
        )  # fmt: skip
        best, runs = min(best, time.perf_counter() - start), runs + 1
    pairs = sum(n * (c - n) + n * (n + 1) / 2 for c, n in requests)
    ops = 4 * heads * dim * pairs / best
    twice = SHARED.get(work, 0) * (len(requests) - 1)  # what is shared need be read but once
    read = (sum(c for c, _ in requests) - twice) * block_bytes / block_size / best
    dot = "bf16" if kv != "f32" and ceilings["bf16"] else "f32"  # half of what bytes do is at bf16's speed
    return {
        "model": model, "work": work, "kv": kv, "block_size": block_size, "us": best * 1e6,
        "gops": ops / 1e9, "of_dot_ceiling": ops / ceilings[dot],
        "gbps": read / 1e9, "of_read_ceiling": read / ceilings["read"],
    }  # fmt: skip


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", choices=_native.available_isas())
    parser.add_argument("--threads", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv", choices=KV_TYPES, default="bf16")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.isa:
        _native.set_isa(args.isa)
    if args.threads:
        _native.set_num_threads(args.threads)
    ceilings = {kind: _native.measure_ceiling(kind) for kind in ("bf16", "f32", "read")}
    results = []
    for model in SHAPES:
        for work in WORK:
            row = measure(model, work, args.block_size, args.kv, args.seconds, ceilings)
            results.append(row)
            print(
                f"{model:14} {work:22} {row['us']:9.0f} us  {row['gops']:7.1f} GOP/s {row['of_dot_ceiling']:5.0%}"
                f"  {row['gbps']:6.1f} GB/s {row['of_read_ceiling']:5.0%}",
                file=sys.stderr,
            )
    settings = {"isa": _native.isa(), "threads": _native.num_threads()}
    report.write(args.json, "attention", settings, {"ceilings": ceilings, "calls": results})


if __name__ == "__main__":
    main()
