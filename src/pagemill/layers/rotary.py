"""Rotary position embedding: the table of cosines and sines for one kind of layer.

Owns every scaling rule (linear, dynamic, yarn, longrope, llama3 and GGUF's frequency factors). A table is computed
once for a fixed number of positions, in float32, and is never indexed past its end: the engine's longest context is
its length.

Two rules depend in other implementations on how long the sequence is at this moment, which would let one request's
length change another's keys. Here the choice is made once, by the length the table is built for:

- longrope takes the short factors if the table fits the length the model was trained on, else the long ones;
- dynamic raises theta for the table's length if that is past the model's own, else leaves it.
"""

from __future__ import annotations

import math

import torch

from pagemill.errors import ModelFormatError, UnsupportedModelError
from pagemill.model_config import ModelConfig, RopeConfig

__all__ = ["SCALINGS", "inverse_frequencies", "longest_context", "rope_table"]

SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def longest_context(config: ModelConfig) -> int:
    """The most positions a user may ask for: the model's own, times the factor where a rule stretches on demand."""
    factors = [
        layer.rope.factor for layer in config.layers if layer.rope and layer.rope.scaling in ("linear", "dynamic")
    ]
    return int(config.max_position_embeddings * max([1.0, *factors]))


def rope_table(rope: RopeConfig, num_positions: int, max_position_embeddings: int) -> torch.Tensor:
    """Cosines and sines, attention factor applied: float32 [num_positions, 2, rotary_dim / 2]."""
    frequencies, attention_factor = inverse_frequencies(rope, num_positions, max_position_embeddings)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.stack((angles.cos(), angles.sin()), dim=1) * attention_factor


def inverse_frequencies(
    rope: RopeConfig, num_positions: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """Radians per position [rotary_dim / 2] and the factor on cosines and sines."""
    half = rope.rotary_dim // 2
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim  # [half]
    frequencies = 1.0 / (rope.theta**exponents)
    attention_factor = 1.0
    match rope.scaling:
        case "default":
            pass
        case "linear":
            frequencies = frequencies / rope.factor
        case "dynamic":
            frequencies = _dynamic(rope, exponents, num_positions, max_position_embeddings)
        case "llama3":
            frequencies = _llama3(rope, frequencies)
        case "yarn":
            frequencies, attention_factor = _yarn(rope, frequencies)
        case "longrope":
            frequencies, attention_factor = _longrope(rope, frequencies, num_positions, max_position_embeddings)
        case other:
            raise UnsupportedModelError(f"rope scaling {other!r} is unknown; known are {', '.join(SCALINGS)}")
    if rope.freq_factors is not None:
        frequencies = frequencies / _factors("rope_freqs", rope.freq_factors, half)
    return frequencies, attention_factor


def _factors(what: str, values: tuple[float, ...], half: int) -> torch.Tensor:
    if len(values) != half:
        raise ModelFormatError(f"{what} has {len(values)} values; the rotated dimensions need {half}")
    return torch.tensor(values, dtype=torch.float32)


def _dynamic(rope: RopeConfig, exponents: torch.Tensor, num_positions: int, own: int) -> torch.Tensor:
    """Theta raised so that the longest position rotates no faster than in training (NTK-aware scaling)."""
    length = max(num_positions, own)
    stretch = rope.factor * length / own - (rope.factor - 1)
    theta = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    raised: torch.Tensor = theta**exponents
    return 1.0 / raised


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    assert rope.original_max_position is not None
    wavelengths = 2 * math.pi / frequencies
    ratio = rope.original_max_position / wavelengths
    blend = ((ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Interpolated where a dimension turns less than beta_slow times in the training length, kept where it turns more
    than beta_fast times, a ramp between (Peng et al., YaRN, section 3)."""
    trained = rope.original_max_position
    assert trained is not None
    dim, half = rope.rotary_dim, rope.rotary_dim // 2

    def dimension_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = frequencies / rope.factor * ramp + frequencies * (1 - ramp)
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope(rope: RopeConfig, frequencies: torch.Tensor, num_positions: int, own: int) -> tuple[torch.Tensor, float]:
    """A factor per dimension, one set for short and one for long contexts (Ding et al., LongRoPE)."""
    original = rope.original_max_position or own
    which, values = (
        ("long_factor", rope.long_factor) if num_positions > original else ("short_factor", rope.short_factor)
    )
    assert values is not None
    frequencies = frequencies / _factors(which, values, rope.rotary_dim // 2)
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(rope.factor) / math.log(original))
