"""What each op is held to: a reference function, the implementations there are, a tolerance, and inputs to try.

Owns the table of ops; csrc/README.md shows it, and tests/kernels/test_coverage.py that no native kernel is left out. An
implementation is named ``module:function`` and imported when asked for, so that the table can be read where a library
is not built. Every implementation takes and returns what the reference does;
tests/kernels/test_ops.py tries ops x implementations x examples on each instruction set.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pagemill.kernels import examples
from pagemill.kernels.reference import (
    activate,
    attention_steps,
    gated,
    hadamard,
    layer_norm,
    linear_group,
    linear_int8,
    rms_norm,
    softcap,
)

__all__ = ["OPS", "Op", "implementation"]

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op. An implementation may differ from the reference by ``atol + rtol * |reference|`` in any element."""

    reference: Function
    examples: Callable[[], Iterator[tuple[str, dict[str, Any]]]]
    """Names and keyword arguments."""
    atol: float
    rtol: float
    why: str
    """What the tolerance allows for."""
    implementations: dict[str, str] = field(default_factory=dict)
    """Name -> module:function."""
    rounding: str | None = None
    """module:function that says how the instruction set in force rounds, as keyword arguments of the reference."""

    def expected(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The reference's result under the instruction set in force."""
        rounding: Callable[[], dict[str, Any]] = dict if self.rounding is None else _named(self.rounding)
        return self.reference(**inputs, **rounding())


def linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias, float32: [N, K] and [M, K] -> [N, M]."""
    return torch.nn.functional.linear(x, matrix, bias)


def gated_linear(x: torch.Tensor, matrix: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, float32: [N, K] and [2 F, K] -> [N, F]."""
    return gated(linear(x, matrix, None), activation)


def scale_softcap(x: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """The end of the logits: x * scale, then cap * tanh(. / cap): [N, V] -> [N, V]."""
    return softcap(x * scale, cap)


CPU = "pagemill.kernels.cpu"

OPS: dict[str, Op] = {
    "rms_norm": Op(
        reference=rms_norm,
        examples=examples.rms_norm,
        atol=1e-6,
        rtol=1e-5,
        why="the order of a sum",
        implementations={"native": f"{CPU}:rms_norm"},
    ),
    "layer_norm": Op(
        reference=layer_norm,
        examples=examples.layer_norm,  # some far from zero, where the mean's own rounding counts
        atol=1e-5,
        rtol=1e-5,
        why="the mean's own rounding where values lie far from 0",
        implementations={"native": f"{CPU}:layer_norm"},
    ),
    "activate": Op(
        reference=activate,
        examples=examples.activate,
        atol=2e-6,
        rtol=1e-6,
        why="erf and tanh by formulas of 2e-7 and 3e-7",
        implementations={"native": f"{CPU}:activate"},
    ),
    "hadamard": Op(
        reference=hadamard,
        examples=examples.hadamard,
        atol=1e-5,
        rtol=1e-5,
        why="the order of the butterflies, up to 1024 values",
        implementations={"native": f"{CPU}:hadamard"},
    ),
    "scale_softcap": Op(
        reference=scale_softcap,
        examples=examples.scale_softcap,
        atol=1e-5,
        rtol=1e-5,
        why="tanh by a formula of 3e-7, times a cap of 30",
        implementations={"native": f"{CPU}:scale_softcap"},
    ),
    "linear": Op(
        reference=linear,
        examples=examples.linear,  # of numbers that bfloat16 holds exactly
        atol=1e-4,
        rtol=1e-4,
        why="the order of a sum of up to 130 products",
        implementations={"native-f32": f"{CPU}:linear_f32", "native-bf16": f"{CPU}:linear_bf16"},
    ),
    "linear_int8": Op(
        reference=linear_int8,
        examples=examples.linear_int8,
        atol=1e-5,
        rtol=1e-5,
        why="integers are summed exactly; the reference rounds its products",
        implementations={"native": f"{CPU}:linear_int8"},
        rounding=f"{CPU}:rounding_of_int8",
    ),
    "linear_group4": Op(
        reference=linear_group,
        examples=examples.linear_group4,
        atol=1e-5,
        rtol=1e-5,
        why="the order of a sum over groups",
        implementations={"native": f"{CPU}:linear_group4"},
    ),
    "linear_group8": Op(
        reference=linear_group,
        examples=examples.linear_group8,
        atol=1e-4,
        rtol=1e-5,
        why="the order of a sum over groups, of terms up to 16 times larger",
        implementations={"native": f"{CPU}:linear_group8"},
        rounding=f"{CPU}:rounding_of_group8",
    ),
    "gated_linear": Op(
        reference=gated_linear,
        examples=examples.gated_linear,
        atol=1e-4,
        rtol=1e-4,
        why="the same, and the activation by a formula",
        implementations={"native-f32": f"{CPU}:gated_linear_f32", "native-bf16": f"{CPU}:gated_linear_bf16"},
    ),
    "attention": Op(
        reference=attention_steps,
        examples=examples.attention,
        atol=2e-5,
        rtol=2e-5,
        why="the order of sums, exp2 and tanh by formulas, a maximum for each tile of 256 keys",
        implementations={"native": f"{CPU}:attention_steps"},
    ),
}


def implementation(op: str, name: str) -> Function:
    """An op's implementation; ImportError where its library is not built."""
    found: Function = _named(OPS[op].implementations[name])
    return found


def _named(place: str) -> Any:
    module, function = place.split(":")
    return getattr(importlib.import_module(module), function)
