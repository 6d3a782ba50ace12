"""Inputs that every op is tried on: ordinary ones, and the edges where kernels break.

Owns nothing but numbers: sizes of one, odd sizes and tails, whole and partial blocks, rows of zeros, windows and soft
caps. Seeded, so that a failure comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pagemill.kernels.ops import AttentionSpec, StepInputs
from pagemill.model_config import RopeConfig

__all__ = [
    "activate",
    "attention",
    "gated_linear",
    "hadamard",
    "layer_norm",
    "linear",
    "linear_group4",
    "linear_group8",
    "linear_int8",
    "rms_norm",
    "scale_softcap",
]

Examples = Iterator[tuple[str, dict[str, Any]]]

BLOCK_SIZE = 16
MAX_POSITIONS = 256


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _short(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that bfloat16 holds exactly."""
    return _draw(*shape, seed=seed).bfloat16().float()


def rms_norm() -> Examples:
    """Widths from 1, with tails behind one and two vectors; no rows; zeros; the large and the tiny."""
    for rows, width in ((1, 1), (0, 64), (3, 7), (2, 45), (1, 83), (5, 576), (2, 4096)):
        yield f"{rows}x{width}", {"x": _draw(rows, width), "weight": _draw(width, seed=1), "eps": 1e-5}
    yield "zeros", {"x": torch.zeros(2, 64), "weight": torch.ones(64), "eps": 1e-6}
    yield "large", {"x": _draw(2, 64) * 1e6, "weight": torch.ones(64), "eps": 1e-6}
    yield "tiny", {"x": _draw(2, 64) * 1e-6, "weight": torch.ones(64), "eps": 1e-6}


def layer_norm() -> Examples:
    """Widths from 1, with tails; no rows; a constant row, whose variance is 0; values far from 0."""
    for rows, width in ((1, 1), (0, 64), (3, 7), (2, 45), (1, 83), (5, 384), (2, 1024)):
        inputs = {"x": _draw(rows, width), "weight": _draw(width, seed=1), "bias": _draw(width, seed=2)}
        yield f"{rows}x{width}", {**inputs, "eps": 1e-12 if width > 1 else 1e-5}
    flat = {"weight": torch.ones(40), "bias": _draw(40, seed=2), "eps": 1e-12}
    yield "constant", {"x": torch.full((2, 40), 3.0), **flat}
    yield "far from zero", {"x": _draw(2, 40) + 50, **flat}


def activate() -> Examples:
    """Both, over the whole range and with tails."""
    for activation in ("gelu", "tanh"):
        for rows, width in ((1, 1), (3, 7), (2, 33), (1, 47), (3, 384)):
            yield f"{activation} {rows}x{width}", {"x": _draw(rows, width) * 3, "activation": activation}
        yield f"{activation} no rows", {"x": torch.empty(0, 8), "activation": activation}
        yield f"{activation} wide", {"x": torch.linspace(-30, 30, 801)[None], "activation": activation}


def hadamard() -> Examples:
    """One block a row, several, and the smallest; no rows."""
    for rows, width, block in ((0, 64, 32), (1, 2, 2), (3, 96, 32), (2, 1536, 512), (2, 2048, 1024), (5, 64, 1)):
        yield f"{rows}x{width}/{block}", {"x": _draw(rows, width), "block": block}


def scale_softcap() -> Examples:
    """With and without a cap; values far beyond it."""
    for rows, width in ((1, 1), (3, 7), (2, 33), (1, 47), (3, 320)):
        yield f"scale {rows}x{width}", {"x": _draw(rows, width), "scale": 0.125, "cap": None}
        yield f"cap {rows}x{width}", {"x": _draw(rows, width) * 100, "scale": 0.5, "cap": 30.0}
    yield "no rows", {"x": torch.empty(0, 8), "scale": 0.5, "cap": 30.0}


SIZES = ((0, 33, 64), (1, 1, 1), (1, 96, 64), (2, 17, 35), (7, 320, 96), (65, 33, 130))
"""Rows, outputs and inputs of a product: one row, many and none, odd sizes and tails."""


def linear() -> Examples:
    """One row, many and none, odd sizes and tails."""
    for rows, outputs, inputs in SIZES:
        for bias in (None, _draw(outputs, seed=2)):
            yield (
                f"{rows}x{outputs}x{inputs}{'' if bias is None else ' bias'}",
                {"x": _short(rows, inputs), "matrix": _short(outputs, inputs, seed=1), "bias": bias},
            )


def linear_int8() -> Examples:
    """All weights there are; a row of zeros, which has no scale."""
    for rows, outputs, inputs in SIZES:
        x = _draw(rows, inputs)
        x[1:2] = 0
        q = torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
        inputs_of = {"x": x, "q": q, "scale": _draw(outputs, seed=2).abs() / 64}
        yield f"{rows}x{outputs}x{inputs}", {**inputs_of, "bias": None}
        yield f"{rows}x{outputs}x{inputs} bias", {**inputs_of, "bias": _draw(outputs, seed=3)}


def _groups(bits: int, sizes: tuple[int, ...]) -> Examples:
    for rows, outputs, inputs in SIZES:
        x = _draw(rows, inputs)
        x[1:2] = 0
        generator = torch.Generator().manual_seed(1)
        for group in sizes:
            count = -(-inputs // group)
            high = 64 if group == 16 else 2**bits  # 16 of up to 6 bits: Q6_K
            q = torch.randint(0, high, (outputs, inputs), generator=generator, dtype=torch.uint8)
            inputs_of = {"x": x, "q": q, "scale": _half(outputs, count, seed=2), "zero": high // 2, "group": group}
            yield f"{rows}x{outputs}x{inputs}/{group}", {**inputs_of, "minimum": None}
            minimum = _half(outputs, count, seed=3)
            yield f"{rows}x{outputs}x{inputs}/{group} minimum", {**inputs_of, "minimum": minimum}


def _half(*shape: int, seed: int) -> torch.Tensor:
    """Scales that float16 holds exactly."""
    return (_draw(*shape, seed=seed) / 64).half().float()


def linear_group4() -> Examples:
    """Groups of all sizes, with and without minima; a row of zeros."""
    yield from _groups(4, (32, 64, 128))


def linear_group8() -> Examples:
    """Groups of all sizes, with and without minima; a row of zeros."""
    yield from _groups(8, (16, 32, 64, 128))


def gated_linear() -> Examples:
    """Both activations; no rows."""
    for rows, features, inputs in ((0, 48, 64), (1, 1, 1), (1, 48, 64), (3, 5, 33), (20, 96, 64)):
        for activation in ("silu", "gelu_tanh"):
            matrix = _short(2 * features, inputs, seed=1) / 4
            yield (
                f"{activation} {rows}x{features}x{inputs}",
                {"x": _short(rows, inputs), "matrix": matrix, "activation": activation},
            )


def attention() -> Examples:
    """Chunks and decodes of three requests over shuffled blocks, for all that layers differ in; a step of nothing."""
    rotary = RopeConfig(rotary_dim=32)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("grouped queries", {}),
        ("one head", {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "rope": RopeConfig(rotary_dim=8)}),
        ("no rotation", {"rope": None}),
        ("part of each head rotated", {"rope": RopeConfig(rotary_dim=16)}),
        ("interleaved pairs", {"rope": RopeConfig(rotary_dim=32, interleaved=True)}),
        ("window", {"window": 20}),
        ("window of one", {"window": 1}),
        ("both ways", {"causal": False}),
        ("both ways, one head", {"causal": False, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "rope": None}),
        ("soft cap", {"softcap": 4.0, "scale": 0.7}),
        ("norm of each head", {"q_norm": _draw(32, seed=3), "k_norm": _draw(32, seed=4)}),
        ("norm of all heads", {"q_norm": _draw(6 * 32, seed=3), "k_norm": _draw(2 * 32, seed=4)}),
    ]
    for name, changes in kinds:
        options = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "rope": rotary, **changes}
        rope: RopeConfig | None = options["rope"]
        spec = AttentionSpec(
            layer=0,
            group=0,
            num_heads=options["num_heads"],
            num_kv_heads=options["num_kv_heads"],
            head_dim=options["head_dim"],
            scale=options.get("scale", options["head_dim"] ** -0.5),
            window=options.get("window"),
            softcap=options.get("softcap"),
            rope=rope,
            rope_table=None if rope is None else _table(rope.rotary_dim),
            q_norm=options.get("q_norm"),
            k_norm=options.get("k_norm"),
            norm_eps=1e-6,
            causal=options.get("causal", True),
        )
        yield name, {"spec": spec, "steps": _steps(spec), "num_blocks": 24, "block_size": BLOCK_SIZE}


def _table(rotary_dim: int) -> torch.Tensor:
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def _steps(spec: AttentionSpec) -> list[tuple[torch.Tensor, StepInputs]]:
    """Projected tokens and inputs of five steps: prompts of 1, 16 and 49 tokens, one of them in two chunks; nothing;
    decodes."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(5), dtype=torch.int32).view(3, 8)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    done = [0, 0, 0]
    steps = []
    for number, counts in enumerate(([1, 16, 33], [0, 1, 16], [0, 0, 0], [1, 1, 1], [1, 0, 30])):
        rows = [row for row in range(3) if counts[row]]
        positions = [p for row in rows for p in range(done[row], done[row] + counts[row])]
        owners = [row for row in rows for _ in range(counts[row])]
        slots = [
            int(order[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
            for row, p in zip(owners, positions, strict=True)
        ]
        done = [before + more for before, more in zip(done, counts, strict=True)]
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + counts[row])
        inputs = StepInputs(
            token_ids=torch.zeros(len(positions), dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([done[row] for row in rows], dtype=torch.int32),
            slot_mapping=[torch.tensor(slots, dtype=torch.int32)],
            block_tables=[order[rows].contiguous()],
            logits_rows=torch.zeros(0, dtype=torch.int32),
        )
        steps.append((_draw(len(positions), width, seed=10 + number), inputs))
    return steps
