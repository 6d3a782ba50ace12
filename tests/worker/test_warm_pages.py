"""Backing KV memory ahead of use changes nothing that it holds, and can be dropped at any moment."""

from __future__ import annotations

import numpy as np
import pytest

_native = pytest.importorskip("pagemill._native")


def test_what_the_memory_holds_stays() -> None:
    arrays = [_native.allocate_bytes(64, 1 << 16) for _ in range(3)]
    for number, array in enumerate(arrays):
        array[:] = number + 1
    warmer = _native.PageWarmer(arrays, 1 << 22)
    for array in arrays:
        array[0, :] = 9
    del warmer
    for number, array in enumerate(arrays):
        assert (array[0] == 9).all()
        assert (array[1:] == number + 1).all()


def test_it_can_be_dropped_at_once_with_the_arrays() -> None:
    for _ in range(20):
        warmer = _native.PageWarmer([_native.allocate_bytes(256, 1 << 20)], 1 << 28)
        del warmer


def test_no_arrays_and_no_bytes_are_fine() -> None:
    del_me = [_native.PageWarmer([], 1 << 20), _native.PageWarmer([np.zeros((2, 8), np.uint8)], 0)]
    assert len(del_me) == 2
