"""The block formats of GGUF: exact integers, scales and minimums, and the numbers they stand for.

Owns the bit layouts (github.com/ggml-org/ggml, ``ggml-common.h`` and ``ggml-quants.c``). Pure numpy on uint8 rows; must
not read files. Every format is a group-wise affine code: weight = scale * q + minimum, q unsigned. Symmetric formats
have minimum = -zero * scale for a whole number ``zero``; dequantising as scale * (q - zero) keeps one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagemill.models.mapped_file import Bytes

__all__ = ["BLOCK_FORMATS", "BlockFormat", "Codes"]

Floats = npt.NDArray[np.float32]

IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16
)  # the 16 levels that IQ4_NL's indices stand for


@dataclass(frozen=True, slots=True)
class Codes:
    """Unpacked blocks. weight = scale * q + minimum, or scale * (q - zero) where ``minimum`` is None."""

    q: Bytes  # [blocks, groups, group]
    scale: Floats  # [blocks, groups]
    minimum: Floats | None  # [blocks, groups]
    zero: int = 0

    def minimums(self) -> Floats:
        """The minimum of each group. [blocks, groups]"""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.scale * np.float32(-self.zero) if self.minimum is None else self.minimum


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One format: ``size`` weights in ``nbytes`` bytes; integers of ``bits`` bits in groups of ``group``."""

    size: int
    nbytes: int
    bits: int
    group: int
    decode: Callable[[Bytes], Codes]

    def unpack(self, blocks: Bytes) -> Codes:
        """[blocks, nbytes] -> integers, scales, minimums. Scales that are not finite stay so, quietly."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.decode(blocks)

    def dequantise(self, blocks: Bytes) -> Floats:
        """[blocks, nbytes] -> [blocks, size], rounded as ggml rounds."""
        codes = self.unpack(blocks)
        weights = codes.q.astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            if codes.minimum is None:
                weights -= np.float32(codes.zero)
                weights *= codes.scale[:, :, None]
            else:
                weights *= codes.scale[:, :, None]
                weights += codes.minimum[:, :, None]
        return weights.reshape(-1, self.size)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of each block. [blocks, 1]"""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones. [..., n] -> [..., 2n]"""
    n = packed.shape[-1]
    out = np.empty((*packed.shape[:-1], 2 * n), dtype=np.uint8)
    np.bitwise_and(packed, 0x0F, out=out[..., :n])
    np.right_shift(packed, 4, out=out[..., n:])
    return out


def _fields(packed: Bytes, bits: int) -> Bytes:
    """The ``8 / bits`` bit fields of each byte, lowest first, as a new axis. [..., n] -> [..., 8 / bits, n]"""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32-bit word at ``at`` is bit 4 of code i. [blocks, 32], 0 or 16"""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Codes:
    return Codes(_nibbles(b[:, 2:])[:, None], _half(b, 0), None, 8)


def _q4_1(b: Bytes) -> Codes:
    return Codes(_nibbles(b[:, 4:])[:, None], _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> Codes:
    return Codes((_nibbles(b[:, 6:]) | _fifth_bits(b, 2))[:, None], _half(b, 0), None, 16)


def _q5_1(b: Bytes) -> Codes:
    return Codes((_nibbles(b[:, 8:]) | _fifth_bits(b, 4))[:, None], _half(b, 0), _half(b, 2))


def _q8_0(b: Bytes) -> Codes:
    return Codes((b[:, 2:] ^ np.uint8(0x80))[:, None], _half(b, 0), None, 128)  # int8 + 128


def _q2_k(b: Bytes) -> Codes:
    """16 bytes of (minimum, scale) nibbles, 64 bytes of 2-bit codes in two halves of 128, d, dmin."""
    q = _fields(b[:, 16:80].reshape(-1, 2, 32), 2)  # [blocks, 2, 4, 32]
    scale = _half(b, 80) * (b[:, :16] & 0x0F)
    minimum = -(_half(b, 82) * (b[:, :16] >> 4))
    return Codes(q.reshape(-1, 16, 16), scale, minimum)


def _q3_k(b: Bytes) -> Codes:
    """32 bytes of high bits, 64 bytes of low 2-bit codes, 12 bytes of sixteen 6-bit scales, d."""
    low = _fields(b[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    high = _fields(b[:, :32], 1)  # [blocks, 8, 32]
    scale_low = _nibbles(b[:, 96:104])  # [blocks, 16]
    scale_high = _fields(b[:, 104:108], 2).reshape(-1, 16)
    scale = _half(b, 108) * ((scale_low | scale_high << np.uint8(4)).astype(np.int8) - 32)
    return Codes((low | high << np.uint8(2)).reshape(-1, 16, 16), scale, None, 4)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Q4_K's and Q5_K's 12 bytes: eight 6-bit scales and eight 6-bit minimums. [blocks, 12] -> 2 x [blocks, 8]"""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | (first >> 2) & 0x30], axis=1)
    minimums = np.concatenate([second & 0x3F, (third >> 4) | (second >> 2) & 0x30], axis=1)
    return scales, minimums


def _q4_k(b: Bytes) -> Codes:
    """d, dmin, scales and minimums, 128 bytes of nibbles: 32 bytes hold two groups of 32."""
    scales, minimums = _six_bit_pairs(b[:, 4:16])
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return Codes(q, _half(b, 0) * scales, -(_half(b, 2) * minimums))


def _q5_k(b: Bytes) -> Codes:
    """As Q4_K, with 32 bytes before the nibbles whose bit i belongs to group i."""
    scales, minimums = _six_bit_pairs(b[:, 4:16])
    q = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | _fields(b[:, 16:48], 1) << np.uint8(4)
    return Codes(q, _half(b, 0) * scales, -(_half(b, 2) * minimums))


def _q6_k(b: Bytes) -> Codes:
    """128 bytes of low nibbles and 64 bytes of high 2-bit fields, in two halves of 128; sixteen int8 scales; d."""
    low = _nibbles(b[:, :128].reshape(-1, 2, 64))  # [blocks, 2, 128]
    high = _fields(b[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 2, 128)
    scale = _half(b, 208) * b[:, 192:208].view(np.int8)
    return Codes((low | high << np.uint8(4)).reshape(-1, 16, 16), scale, None, 32)


def _iq4_nl(b: Bytes) -> Codes:
    levels = (IQ4_NL_VALUES + 128).astype(np.uint8)
    return Codes(levels[_nibbles(b[:, 2:])][:, None], _half(b, 0), None, 128)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, 4, 32, _q4_0),
    "Q4_1": BlockFormat(32, 20, 4, 32, _q4_1),
    "Q5_0": BlockFormat(32, 22, 5, 32, _q5_0),
    "Q5_1": BlockFormat(32, 24, 5, 32, _q5_1),
    "Q8_0": BlockFormat(32, 34, 8, 32, _q8_0),
    "Q2_K": BlockFormat(256, 84, 2, 16, _q2_k),
    "Q3_K": BlockFormat(256, 110, 3, 16, _q3_k),
    "Q4_K": BlockFormat(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockFormat(256, 176, 5, 32, _q5_k),
    "Q6_K": BlockFormat(256, 210, 6, 16, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, 8, 32, _iq4_nl),
}
