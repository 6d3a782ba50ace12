"""The functions that models are written in.

A decoder is one piece of Python that calls the methods of an :class:`Ops`. Which Ops decides what happens:

- :class:`pagemill.kernels.reference.ReferenceOps` computes with PyTorch's own functions, on any device;
- :class:`pagemill.worker.graphs.Recorder` computes nothing: it records the calls into a native program that replays
  the whole step in one call.

Shapes use N tokens of a step (all requests' chunks, concatenated), R requests (rows), H hidden size, Hq / Hkv query
and KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagemill.model_config import RopeConfig

__all__ = ["AttentionSpec", "LinearWeight", "MoeWeights", "Ops", "StepInputs"]

Value = Any
"""A tensor, or what stands for one while a program is recorded."""


@dataclass(slots=True, eq=False)
class StepInputs:
    """One step's tensors. int32 throughout, as the native kernels want; group = kind of KV cache."""

    token_ids: torch.Tensor  # [N]
    positions: torch.Tensor  # [N] for rope and the cache; of an encoder, rows of its position table
    query_start: torch.Tensor  # [R + 1] first token of each row, then N
    context_lens: torch.Tensor  # [R] tokens in the KV cache once this step is written
    slot_mapping: list[torch.Tensor]  # per group [N]: block_id * block_size + offset
    block_tables: list[torch.Tensor]  # per group [R, max_blocks]; entries behind a window may be -1
    logits_rows: torch.Tensor  # [L] which of the N tokens need logits
    logits_kept: torch.Tensor | None = None
    """bool [L]: of which of them more is wanted than the best token, so that they must be stored; None: of all."""


class LinearWeight(Protocol):
    """A weight matrix as a LinearMethod packed it, bias included."""

    in_features: int
    out_features: int
    bias: torch.Tensor | None  # [out_features]

    @property
    def nbytes(self) -> int:
        """Bytes it holds in memory."""

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias in x's type: [N, in_features] -> [N, out_features]. What ReferenceOps computes with."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows ``ids`` [N] in the type of activations, [N, in_features]: an embedding lookup."""

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32 [out_features, in_features]."""


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionSpec:
    """What is constant about one layer's attention."""

    layer: int
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    rope: RopeConfig | None
    rope_table: torch.Tensor | None  # float32 [max_positions, 2, rotary_dim / 2]: cos, sin; attention factor applied
    q_norm: torch.Tensor | None  # [D] (per head) or [Hq * D] (full)
    k_norm: torch.Tensor | None  # [D] or [Hkv * D]
    norm_eps: float
    causal: bool = True
    """False: each query sees all of its request's keys, which are all written in this step."""


@dataclass(slots=True, eq=False, kw_only=True)
class MoeWeights:
    """A router and its experts."""

    router: LinearWeight
    gate_up: list[LinearWeight]  # per expert [2 I, H]
    down: list[LinearWeight]  # per expert [H, I]
    experts_per_token: int
    renormalize: bool
    activation: str
    down_hadamard: int = 0
    """Block of the Hadamard transform on down's input; 0: none."""


class Ops(Protocol):
    """All that a decoder may ask for. Each method returns a new value."""

    def embed(self, table: LinearWeight, scale: float) -> Value:
        """Rows of ``table`` for the step's token ids, times ``scale``: [N, H]."""

    def positions(self, table: torch.Tensor) -> Value:
        """Rows of ``table`` (float32 [P, H]) for the step's positions: [N, H]."""

    def layer_norm(self, x: Value, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Value:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32: [N, H]."""

    def activate(self, x: Value, activation: str) -> Value:
        """gelu (the exact one) or tanh of each element."""

    def rms_norm(self, x: Value, weight: torch.Tensor, eps: float) -> Value:
        """x / rms(x) * weight over the last dimension; the mean square in float32: [N, H]."""

    def add(self, x: Value, y: Value, scale: float = 1.0) -> Value:
        """x + scale * y: the residual."""

    def linear(self, x: Value, weight: LinearWeight) -> Value:
        """x [N, in] -> [N, out], bias added."""

    def gated_linear(self, x: Value, weight: LinearWeight, activation: str) -> Value:
        """act(gate) * up, where ``weight`` stacks gate and up: [N, in] -> [N, out / 2]."""

    def hadamard(self, x: Value, block: int) -> Value:
        """Each run of ``block`` values (a power of two) times the orthonormal Walsh-Hadamard matrix: [N, K]."""

    def rope_and_cache(self, qkv: Value, spec: AttentionSpec) -> Value:
        """Split [N, (Hq + 2 Hkv) D], norm q and k, rotate, write k and v to the layer's cache; return q [N, Hq D]."""

    def attend(self, q: Value, spec: AttentionSpec) -> Value:
        """Attention of each query over its request's cached keys: [N, Hq D]."""

    def moe(self, x: Value, weights: MoeWeights) -> Value:
        """Mixture of experts: [N, H] -> [N, H]."""

    def select_rows(self, x: Value) -> Value:
        """The step's ``logits_rows`` of x: [L, H]."""

    def result(self, x: Value) -> Value:
        """x itself as float32 [L, H], where a model ends without logits."""

    def logits(self, x: Value, weight: LinearWeight, scale: float, softcap: float | None) -> Value:
        """float32 [L, V]: x W^T * scale, then softcap * tanh(. / softcap) where there is one."""
