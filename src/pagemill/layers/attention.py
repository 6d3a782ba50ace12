"""Attention of one layer: project, rotate and store, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.kernels.ops import AttentionSpec, LinearWeight, Ops, Value

__all__ = ["Attention"]


@dataclass(slots=True, eq=False, kw_only=True)
class Attention:
    """The weights and constants of one layer's attention."""

    qkv: LinearWeight  # [(Hq + 2 Hkv) D, H]
    o: LinearWeight  # [H, Hq D]
    spec: AttentionSpec

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        q = ops.rope_and_cache(ops.linear(x, self.qkv), self.spec)
        return ops.linear(ops.attend(q, self.spec), self.o)

    @property
    def weights(self) -> list[LinearWeight]:
        """All packed matrices."""
        return [self.qkv, self.o]
