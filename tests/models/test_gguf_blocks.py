"""Every block format against gguf-py's own dequantisation."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import quants

from pagemill.models.gguf_blocks import BLOCK_FORMATS
from tests.models.files import random_blocks


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_dequantised_random_blocks_equal_ggufs_bit_for_bit(kind: str) -> None:
    rows = random_blocks(kind, 64, 1024)
    form = BLOCK_FORMATS[kind]
    ours = form.dequantise(rows.reshape(-1, form.nbytes)).reshape(64, 1024)
    np.testing.assert_array_equal(ours, quants.dequantize(rows, Q[kind]))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_codes_are_integers_of_the_stated_width_that_give_the_weights(kind: str) -> None:
    rows = random_blocks(kind, 16, 512, seed=1)
    form = BLOCK_FORMATS[kind]
    codes = form.unpack(rows.reshape(-1, form.nbytes))
    assert codes.q.dtype == np.uint8
    assert codes.q.max() < 1 << form.bits
    assert codes.q.shape == (16 * 512 // form.size, form.size // form.group, form.group)
    weights = codes.q * codes.scale[..., None] + codes.minimums()[..., None]
    exact = quants.dequantize(rows, Q[kind])
    largest = np.abs(codes.scale).max() * (1 << form.bits)  # rounding is relative to what is added, not to the sum
    np.testing.assert_allclose(weights.reshape(exact.shape), exact, rtol=0, atol=largest * 2.0**-22)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_scales_that_are_not_finite_pass_quietly(kind: str) -> None:
    form = BLOCK_FORMATS[kind]
    blocks = np.full((3, form.nbytes), 0xFF, dtype=np.uint8)
    assert not np.isfinite(form.dequantise(blocks)).any()
    assert form.unpack(blocks).minimums().shape == (3, form.size // form.group)


def test_a_quantised_matrix_round_trips_through_ggufs_quantiser() -> None:
    weights = np.random.default_rng(2).standard_normal((8, 256), dtype=np.float32)
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        form = BLOCK_FORMATS[kind]
        rows = quants.quantize(weights, Q[kind])
        error = np.abs(form.dequantise(rows.reshape(-1, form.nbytes)).reshape(8, 256) - weights).max()
        assert error < 8.0 / (1 << form.bits)
