"""The native kernels behind the references' signatures, one op at a time.

For trying kernels and for tests: a model's step does not come through here but runs as one recorded program
(worker/graphs.py). Everything is float32 on the CPU: another type is a ValueError, another layout is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from pagemill import _native
from pagemill.kernels.ops import AttentionSpec, StepInputs

__all__ = [
    "activate",
    "attention_steps",
    "gated_linear_bf16",
    "gated_linear_f32",
    "hadamard",
    "layer_norm",
    "linear_bf16",
    "linear_f32",
    "linear_group4",
    "linear_group8",
    "linear_int8",
    "rms_norm",
    "rounding_of_group8",
    "rounding_of_int8",
    "scale_softcap",
]

FLOAT32_KV = 1

Kind = Literal["f32", "bf16"]
Activation = Literal["silu", "gelu_tanh"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[N, H] -> [N, H]."""
    out = torch.empty(x.shape)
    _native.rms_norm(x.contiguous(), weight.contiguous(), eps, out)
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """[N, H] -> [N, H]."""
    out = torch.empty(x.shape)
    _native.layer_norm(x.contiguous(), weight.contiguous(), bias.contiguous(), eps, out)
    return out


def activate(x: torch.Tensor, activation: Literal["gelu", "tanh"]) -> torch.Tensor:
    """[N, H] -> [N, H]."""
    out = x.clone(memory_format=torch.contiguous_format)
    _native.activate(out, activation)
    return out


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """[N, K] -> [N, K]."""
    out = x.clone(memory_format=torch.contiguous_format)
    _native.hadamard(out, block)
    return out


def scale_softcap(x: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """[N, V] -> [N, V]."""
    out = x.clone(memory_format=torch.contiguous_format)
    _native.scale_softcap(out, scale, cap or 0.0)
    return out


def linear_f32(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[N, K] -> [N, M], weights kept as float32."""
    return _linear("f32", x, matrix, bias)


def linear_bf16(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[N, K] -> [N, M], weights kept as bfloat16."""
    return _linear("bf16", x, matrix, bias)


def _linear(kind: Kind, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    packed = _native.PackedLinear(kind, *matrix.shape, bias=bias is not None)
    packed.write_floats(0, matrix.contiguous())
    if bias is not None:
        packed.write_bias(0, bias.contiguous())
    return _multiply(x, packed)


def linear_int8(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[N, K] -> [N, M], int8 weights with one scale per output."""
    packed = _native.PackedLinear("int8", *q.shape, bias=bias is not None)
    packed.write_int8(0, q.contiguous(), scale.contiguous())
    if bias is not None:
        packed.write_bias(0, bias.contiguous())
    return _multiply(x, packed)


def rounding_of_int8() -> dict[str, bool]:
    """How linear_int8's reference is to round under the instruction set in force."""
    return _rounding(_native.PackedLinear("int8", 1, 1))


def rounding_of_group8() -> dict[str, bool]:
    """The same of linear_group8."""
    return _rounding(_native.PackedLinear("group8", 1, 1, group=32))


def _rounding(packed: _native.PackedLinear) -> dict[str, bool]:
    return {"pairs": packed.activation_kind.endswith("pairs")}


def linear_group4(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, zero: int, group: int
) -> torch.Tensor:
    """[N, K] -> [N, M], weights of 4 bits."""
    return _grouped("group4", x, q, scale, minimum, zero, group)


def linear_group8(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None, zero: int, group: int
) -> torch.Tensor:
    """[N, K] -> [N, M], weights of up to 8 bits."""
    return _grouped("group8", x, q, scale, minimum, zero, group)


def _grouped(
    kind: Literal["group4", "group8"],
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    zero: int,
    group: int,
) -> torch.Tensor:
    packed = _native.PackedLinear(kind, *q.shape, group=group, has_min=minimum is not None)
    minimum = None if minimum is None else minimum.contiguous()
    packed.write_groups(0, q.contiguous(), scale.contiguous(), minimum, zero)
    return _multiply(x, packed)


def _multiply(x: torch.Tensor, packed: _native.PackedLinear) -> torch.Tensor:
    out = torch.empty(x.shape[0], packed.n)
    _native.linear(x.contiguous(), packed, out)
    return out


def gated_linear_f32(x: torch.Tensor, matrix: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[N, K] -> [N, F], weights kept as float32."""
    return _gated("f32", x, matrix, activation)


def gated_linear_bf16(x: torch.Tensor, matrix: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[N, K] -> [N, F], weights kept as bfloat16."""
    return _gated("bf16", x, matrix, activation)


def _gated(kind: Kind, x: torch.Tensor, matrix: torch.Tensor, activation: Activation) -> torch.Tensor:
    packed = _native.PackedLinear(kind, *matrix.shape, gated=True)
    packed.write_floats(0, matrix.contiguous())
    out = torch.empty(x.shape[0], matrix.shape[0] // 2)
    _native.linear(x.contiguous(), packed, out, gate=activation)
    return out


def attention_steps(
    spec: AttentionSpec, steps: Sequence[tuple[torch.Tensor, StepInputs]], num_blocks: int, block_size: int
) -> torch.Tensor:
    """Steps of one layer over one cache, float32: their outputs one after another [tokens, Hq D]."""
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    layout = {**heads, "block_size": block_size, "kv_type": FLOAT32_KV}
    bytes_per_block = _native.kv_block_bytes(FLOAT32_KV, block_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.zeros(num_blocks, bytes_per_block, dtype=torch.uint8)
    results = []
    for qkv, inputs in steps:
        qkv = qkv.clone(memory_format=torch.contiguous_format)
        _native.rope_and_cache(
            qkv,
            cache,
            inputs.positions,
            inputs.slot_mapping[spec.group],
            spec.rope_table,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            q_norm=spec.q_norm,
            k_norm=spec.k_norm,
            eps=spec.norm_eps,
            **layout,
        )
        out = torch.empty(qkv.shape[0], spec.num_heads * spec.head_dim)
        _native.attention(
            qkv,
            cache,
            inputs.query_start,
            inputs.context_lens,
            inputs.block_tables[spec.group],
            out,
            scale=spec.scale,
            window=spec.window or 0,
            softcap=spec.softcap or 0.0,
            causal=spec.causal,
            **layout,
        )
        results.append(out)
    return torch.cat(results)
