"""No kernel without its cases: every op, every native function and every instruction of a program is tried.

What is tried here is the list; test_ops.py, test_linear.py, test_attention.py, test_program.py and
tests/sampling/test_native.py try the numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill import _native
from pagemill.config import EngineConfig
from pagemill.kernels.ops import Ops
from pagemill.kernels.registry import OPS, implementation
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from pagemill.worker.graphs import Recorder
from tests.models.tiny import FAMILIES, tiny_checkpoint
from tests.models.tiny_bert import tiny_bert, tiny_cross_encoder

ROOT = Path(__file__).parents[2]
LANES = 32
"""The widest run of values that a kernel takes at once; what is left over is a tail."""

NOT_KERNELS = {
    "isa", "available_isas", "set_isa", "num_threads", "set_num_threads", "usable_cores",
    "measure_ceiling", "time_linear", "team_selftest", "kv_block_bytes", "allocate_bytes",
}  # fmt: skip
TRIED_IN = {
    "quantize_token": "tests/kernels/test_linear.py",
    "quantize_group": "tests/kernels/test_linear.py",
    "row_extremes": "tests/sampling/test_native.py",
    "best_allowed": "tests/sampling/test_native.py",
    "row_logprobs": "tests/sampling/test_native.py",
    "forbid_tokens": "tests/sampling/test_native.py",
    "draw_rows": "tests/sampling/test_native.py",
}
"""Kernels with integers or draws for an answer, which a tolerance does not fit."""
BY_WRAPPER = {
    "row_extremes": "best(", "best_allowed": "best_allowed(", "row_logprobs": "logprobs(", "forbid_tokens": "forbid(",
    "draw_rows": "draw(",
}  # fmt: skip


@pytest.mark.parametrize("op", [name for name, entry in OPS.items() if "x" in next(entry.examples())[1]])
def test_every_op_is_tried_on_the_edges(op: str) -> None:
    """No rows, one and several; one value, whole vectors, and a tail behind them (of hadamard: several blocks)."""
    shapes = {tuple(inputs["x"].shape) for _, inputs in OPS[op].examples()}
    rows, widths = {shape[0] for shape in shapes}, {shape[1] for shape in shapes}
    assert {0, 1} < rows
    assert min(widths) <= 2
    assert any(width % LANES == 0 for width in widths)
    assert any(width > LANES and width % 16 for width in widths) or op == "hadamard"


def test_attention_is_tried_on_the_edges() -> None:
    """Steps of no rows and several; contexts of one token, whole blocks and part of one; all that layers differ in."""
    specs, counts, contexts = [], set(), set()
    for _, inputs in OPS["attention"].examples():
        specs.append(inputs["spec"])
        for qkv, step in inputs["steps"]:
            counts.add(len(qkv))
            contexts |= set(step.context_lens.tolist())
    assert 0 in counts
    assert 1 in contexts
    assert {length % 16 == 0 for length in contexts} == {True, False}
    for name in ("window", "softcap", "rope", "q_norm", "causal"):
        assert len({getattr(spec, name) is None or getattr(spec, name) is False for spec in specs}) == 2, name


def test_every_native_function_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that Python can call is behind an op's implementation, or named with the file that tries it."""
    called: set[str] = set()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return call

    functions = {name for name in dir(_native) if callable(getattr(_native, name)) and not name.startswith("_")}
    functions -= {name for name in functions if inspect.isclass(getattr(_native, name))}
    for name in functions:
        monkeypatch.setattr(_native, name, noted(name, getattr(_native, name)))
    for op, entry in OPS.items():
        for name in entry.implementations:
            for _, inputs in entry.examples():
                implementation(op, name)(**inputs)
    assert functions - called - NOT_KERNELS - set(TRIED_IN) == set()
    for name, file in TRIED_IN.items():
        assert name in functions
        assert BY_WRAPPER.get(name, name) in (ROOT / file).read_text(), f"{file} tries no {name}"


def test_every_op_of_a_model_is_recorded_by_some_family(tmp_path: Path) -> None:
    """test_program.py compares each family's program with the reference; here: together they use all there is."""
    used: set[str] = set()

    class Noting(Recorder):
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    folders = [tiny_checkpoint(family, tmp_path / family) for family in FAMILIES]
    folders += [make(tmp_path / make.__name__) for make in (tiny_bert, tiny_cross_encoder)]
    for folder in folders:
        checkpoint = open_checkpoint(resolve_source(str(folder)))
        model = load_model(checkpoint, EngineConfig(model=str(folder), dtype="float32"), native=True)
        checkpoint.close()
        with torch.inference_mode():
            model.forward(Noting())
    wanted = {name for name in vars(Ops) if not name.startswith("_")}
    assert wanted - used == {"hadamard"}  # of rotated int8: tests/quant/test_int8.py


def test_the_table_of_tolerances_is_the_one_in_force() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "csrc/README.md").read_text(), re.M)
    assert [tuple(cell.strip() for cell in row) for row in rows] == [
        (op, ", ".join(entry.implementations), f"{entry.atol:.0e} + {entry.rtol:.0e} of the value", entry.why)
        for op, entry in OPS.items()
    ]
