"""Runs a kernel test on each instruction set that the machine has."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

_native = pytest.importorskip("pagemill._native", reason="built without the native kernels")


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in force during the test."""
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test change the number of threads."""
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


@pytest.fixture
def changing_threads(threads: None) -> Iterator[None]:
    """Another thread changes the number of threads all the while, as a second engine may."""
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            for count in (1, 8, 2, 5):
                _native.set_num_threads(count)

    other = threading.Thread(target=change)
    other.start()
    yield
    over.set()
    other.join()
