"""The thread pool: every task once, threads that the system does not give, and a number of them that changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

native = pytest.importorskip("pagemill._native")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_task_runs_once(count: int) -> None:
    native.set_num_threads(count)
    assert native.team_selftest(200, 37) == 0


def test_threads_that_the_system_does_not_give_are_an_error_not_an_end() -> None:
    code = """
import resource, torch
from pagemill import _native
x, out = torch.ones(64, 64), torch.empty(64, 64)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
_native.set_num_threads(256)
try:
    _native.rms_norm(x, torch.ones(64), 1e-6, out)
except RuntimeError as error:
    print(error)
_native.set_num_threads(2)
_native.rms_norm(x, torch.ones(64), 1e-6, out)
print(out.sum().item())
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "of 256 threads" in shown[0]
    assert "--num-threads" in shown[0]
    assert float(shown[1]) == pytest.approx(64 * 64)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", ["int8", "bf16", "f32", "read"])
def test_a_ceiling_is_measured_while_the_number_of_threads_changes(kind: str, changing_threads: None) -> None:
    for _ in range(20):
        rate = native.measure_ceiling(kind, 0.01, 4 << 20)
        assert rate >= 0
        assert rate > 1e6 or kind in ("int8", "bf16")  # which not every set has
