"""The matrix products against the machine's own ceilings, measured in the same run.

    python benchmarks/kernels.py [--isa avx2] [--threads 2] [--kinds int8,group4] [--rows 1,60] [--json out.json]

For each kind of weights, shape and number of rows: the time of one product (activations ready; with --prepare their
quantisation, too), operations a second against the dot-product ceiling, and bytes of weights a second against the
memory ceiling. Weights are taken in turn from as many copies as make them come from memory ("cold", as in a model)
when there are few rows, and from one ("warm") otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from pagemill import _native
from pagemill.bench import report

SHAPES: dict[str, tuple[int, int, bool]] = {
    "SmolLM2-135M qkv": (960, 576, False),
    "SmolLM2-135M o": (576, 576, False),
    "SmolLM2-135M gate_up": (3072, 576, True),
    "SmolLM2-135M down": (576, 1536, False),
    "SmolLM2-135M logits": (49152, 576, False),
    "Qwen3-0.6B qkv": (4096, 1024, False),
    "Qwen3-0.6B o": (1024, 2048, False),
    "Qwen3-0.6B gate_up": (6144, 1024, True),
    "Qwen3-0.6B down": (1024, 3072, False),
    "Qwen3-0.6B logits": (151936, 1024, False),
}
"""Layer -> (rows of W, K, gated)."""

KINDS = ("f32", "bf16", "int8", "group4", "group4_min", "group8", "group8_min", "group8_16")
COLD_BYTES = 128 << 20
"""Weights that no cache holds."""
SKINNY = 8
"""Up to this many rows the weights' way from memory decides."""


def pack(kind: str, rows: int, k: int, gated: bool) -> _native.PackedLinear:
    """Random weights of one kind."""
    base, _, rest = kind.partition("_")
    group = (16 if rest.startswith("16") else 32) if base.startswith("group") else 0
    w = _native.PackedLinear(base, rows, k, gated=gated, group=group, has_min=kind.endswith("min"))
    for first in range(0, rows, 8192):
        n = min(8192, rows - first)
        if not group:
            w.write_floats(
                first, torch.randn(n, k) / k**0.5
            )  # outputs of a model's size: gates that overflow cost more
            continue
        q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        scale = torch.rand(n, -(-k // group)) / 64
        w.write_groups(first, q, scale, minimum=-scale if w.has_min else None, zero=8)
    return w


def measure(
    kind: str, shape: str, rows: int, budget_s: float, prepare: bool, ceilings: dict[str, float]
) -> dict[str, Any]:
    """One product: JSON with time, rates and shares of the ceilings."""
    n, k, gated = SHAPES[shape]
    first = pack(kind, n, k, gated)
    copies = [first]
    cold = rows <= SKINNY
    while cold and len(copies) * first.nbytes < COLD_BYTES:
        copies.append(pack(kind, n, k, gated))
    _native.time_linear(copies, rows, 1)
    once = _native.time_linear(copies, rows, 3, prepare) * len(copies)
    seconds = _native.time_linear(copies, rows, max(5, min(2000, int(budget_s / once))), prepare)
    ops, read = 2 * rows * n * k / seconds, first.nbytes / seconds
    dot = "f32" if kind == "f32" or (kind == "bf16" and not ceilings["bf16"]) else "bf16" if kind == "bf16" else "int8"
    return {
        "kind": kind, "shape": shape, "n": n, "k": k, "rows": rows, "weights": "cold" if cold else "warm",
        "us": seconds * 1e6, "gops": ops / 1e9, "of_dot_ceiling": ops / ceilings[dot],
        "gbps": read / 1e9, "of_read_ceiling": read / ceilings["read_memory"],
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=_native.isa(), choices=_native.available_isas())
    parser.add_argument("--threads", type=int, default=_native.num_threads())
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="1,4,8,16,60,240")
    parser.add_argument("--shapes", default="SmolLM2", help="part of a shape's name")
    parser.add_argument("--prepare", action="store_true", help="include the activations' quantisation")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds for each figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _native.set_isa(args.isa)
    _native.set_num_threads(args.threads)
    ceilings = {kind: _native.measure_ceiling(kind, 1.0) for kind in ("int8", "bf16", "f32")}
    ceilings["read_memory"] = _native.measure_ceiling("read", 3.0, 1 << 28)
    ceilings["read_l3"] = _native.measure_ceiling("read", 0.5, 16 << 20)
    print(
        f"{args.isa}, {args.threads} threads; ceilings: ",
        ", ".join(f"{k} {v / 1e9:.0f}" for k, v in ceilings.items()),
        "G/s",
    )
    print(f"{'kind':12} {'shape':22} {'rows':>5} {'us':>9} {'GOP/s':>7} {'%dot':>5} {'GB/s':>6} {'%read':>5}")
    results = []
    for kind in args.kinds.split(","):
        for shape in (name for name in SHAPES if args.shapes in name):
            for rows in map(int, args.rows.split(",")):
                r = measure(kind, shape, rows, args.budget, args.prepare, ceilings)
                results.append(r)
                print(
                    f"{kind:12} {shape:22} {rows:5} {r['us']:9.1f} {r['gops']:7.0f} {100 * r['of_dot_ceiling']:5.0f} "
                    f"{r['gbps']:6.1f} {100 * r['of_read_ceiling']:5.0f}",
                    flush=True,
                )
    settings = {"isa": args.isa, "threads": args.threads}
    report.write(args.json, "kernels", settings, {"ceilings": ceilings, "products": results})


if __name__ == "__main__":
    sys.exit(main())
