"""Every op, every implementation of it, every example input, on each instruction set: within the op's tolerance."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagemill import _native
from pagemill.kernels import cpu
from pagemill.kernels.registry import OPS, implementation

CASES = [
    pytest.param(op, name, inputs, id=f"{op}-{name}-{example}")
    for op, entry in OPS.items()
    for name in entry.implementations
    for example, inputs in entry.examples()
]


@pytest.mark.parametrize(("op", "name", "inputs"), CASES)
def test_implementations_stay_within_the_op_s_tolerance(op: str, name: str, inputs: dict[str, Any], isa: str) -> None:
    entry = OPS[op]
    expected = entry.expected(inputs)
    got = implementation(op, name)(**inputs)
    torch.testing.assert_close(got, expected, atol=entry.atol, rtol=entry.rtol)


@pytest.mark.parametrize(("op", "name", "inputs"), CASES)
def test_inputs_are_left_as_they_were(op: str, name: str, inputs: dict[str, Any]) -> None:
    tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    before = {key: value.clone() for key, value in tensors.items()}
    implementation(op, name)(**inputs)
    assert all(torch.equal(value, before[key]) for key, value in tensors.items())


def test_every_op_has_an_implementation_and_examples() -> None:
    assert all(entry.implementations and list(entry.examples()) for entry in OPS.values())


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "activate", "hadamard", "scale_softcap", "linear"])
def test_rows_may_lie_in_any_order(op: str) -> None:
    """A transposed matrix is copied on the way in, and the result is that of the copy."""
    name = next(iter(OPS[op].implementations))
    for _, inputs in OPS[op].examples():
        turned = {
            key: value.T.contiguous().T if isinstance(value, torch.Tensor) and value.ndim == 2 else value
            for key, value in inputs.items()
        }
        assert torch.equal(implementation(op, name)(**turned), implementation(op, name)(**inputs))


def matrix(kind: Any = "f32", rows: int = 3, k: int = 4) -> _native.PackedLinear:
    return _native.PackedLinear(kind, rows, k)


X = torch.ones(2, 4)
ONES, ZEROS = torch.ones(4), torch.zeros(2, 4)
FROZEN = np.zeros((2, 4), np.float32)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _native.rms_norm(X, ONES, 0.1, ZEROS.double()),
            "is float64 [2, 4] of strides [4, 1], but must be float32",
        ),
        (lambda: _native.rms_norm(X, ONES, 0.1, ZEROS.bfloat16()), "is bfloat16 [2, 4]"),
        (
            lambda: _native.rms_norm(X, ONES, 0.1, torch.zeros(2, 8)[:, ::2]),
            "strides [8, 2], but must be float32 [*, *], con",
        ),
        (lambda: _native.rms_norm(X, ONES, 0.1, torch.zeros(4, 2).T), "of strides [1, 2]"),
        (lambda: _native.rms_norm(X, ONES, 0.1, FROZEN), "contiguous, writable"),
        (lambda: _native.rms_norm(X, ONES, 0.1, ZEROS[0]), "is float32 [4] of strides [1], but must be float32 [*, *]"),
        (lambda: _native.rms_norm(X.numpy().astype(np.int8), ONES, 0.1, ZEROS), "is int8 [2, 4]"),
        (lambda: _native.rms_norm([[1.0]], ONES, 0.1, ZEROS), "list that cannot be read as an array"),
        (lambda: _native.layer_norm(X, ONES, ONES.double(), 0.1, ZEROS), "is float64 [4]"),
        (lambda: _native.activate(X.double(), "gelu"), "is float64"),
        (lambda: _native.scale_softcap(X.half(), 2.0), "is float16"),
        (lambda: _native.hadamard(X.double(), 4), "is float64"),
        (lambda: _native.hadamard(torch.ones(4, 2).T, 2), "contiguous along its last axis, whose values lie 2 apart"),
        (lambda: _native.hadamard(torch.ones(4).expand(2, 4), 4), "rows of x overlap"),
        (lambda: _native.linear(X, matrix(), torch.zeros(2, 3).double()), "is float64"),
        (lambda: _native.linear(X, matrix(), torch.zeros(1, 3), rows=torch.ones(1)), "is float32 [1]"),
        (lambda: matrix("int8").write_int8(0, torch.ones(3, 4), torch.ones(3)), "but must be int8"),
        (
            lambda: matrix("int8").write_int8(0, torch.ones(3, 4).char(), torch.ones(3).half()),
            "but must be float32 [*]",
        ),
        (lambda: matrix().write_floats(0, torch.ones(3, 4).double()), "rows must be float32, float16 or bfloat16"),
        (lambda: matrix().unpack(torch.zeros(3, 4).half()), "is float16"),
        (lambda: _native.quantize_token(X, ZEROS.int(), torch.zeros(2, 1), torch.zeros(2, 1).int()), "is int32 [2, 4]"),
        (lambda: _native.PageWarmer([ZEROS], 8), "is float32"),
        (lambda: cpu.activate(X.bfloat16(), "gelu"), "is bfloat16"),
    ],
)
def test_an_array_of_another_type_or_layout_is_an_error(call: Callable[[], object], message: str) -> None:
    """Not a copy, which would take the result with it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
