"""Random numbers that depend on (seed, position) alone.

Owns the definition that every sampler follows, native ones included; keeps no state, so a request that is preempted,
moved to another row or batched with others draws the same numbers.

Definition:

- Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
- key     = (seed mod 2^32, seed div 2^32), the seed taken modulo 2^64 (a negative one in two's complement).
- counter = (position mod 2^32, position div 2^32, stream, 0). ``position`` is the index in its sequence of the token
  being drawn: the number of tokens, prompt included, before it. Stream 0 draws tokens; other streams are free.
- uniform = ((x0 >> 5) * 2^26 + (x1 >> 6) + 0.5) * 2^-53 in float64, from the first two output words; in (0, 1).
- Choice: each kept token i has the weight w_i = exp(scaled_i - max scaled), float32. Walking the kept tokens in
  ascending id, the first whose cumulated weight (float64) exceeds uniform * total is drawn; if rounding leaves none,
  the last kept token is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["STREAM_SAMPLE", "philox", "uniforms"]

STREAM_SAMPLE = 0

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32 with ten rounds: counters [n, 4] and keys [n, 2] to words [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].astype(np.uint32), key[:, 1].astype(np.uint32)
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + _W0, k1 + _W1
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(
    seeds: NDArray[np.uint64], positions: NDArray[np.integer], stream: int = STREAM_SAMPLE
) -> NDArray[np.float64]:
    """One number in (0, 1) for each (seed, position): [n], [n] -> [n]."""
    place = positions.astype(np.uint64)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = place & _LOW, place >> _SHIFT, stream
    key = np.stack([seeds & _LOW, seeds >> _SHIFT], axis=1).astype(np.uint32)
    words = philox(counter, key).astype(np.float64)
    high, low = np.floor(words[:, 0] / 32.0), np.floor(words[:, 1] / 64.0)
    return np.asarray((high * 67108864.0 + low + 0.5) * 2.0**-53)
