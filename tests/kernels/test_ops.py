"""Every op, every implementation of it, every example input, on each instruction set: within the op's tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
    expected = entry.reference(**inputs)
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
