"""The second half of a block: a gated MLP, a mixture of them, or an encoder's plain one."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.kernels.ops import LinearWeight, MoeWeights, Ops, Value

__all__ = ["MLP", "Experts", "GatedMLP"]


@dataclass(slots=True, eq=False, kw_only=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)), with a Hadamard transform before down where its weights expect one."""

    gate_up: LinearWeight  # [2 I, H]
    down: LinearWeight  # [H, I]
    activation: str
    down_hadamard: int = 0
    """Block of the transform; 0: none."""

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        inner = ops.gated_linear(x, self.gate_up, self.activation)
        if self.down_hadamard:
            inner = ops.hadamard(inner, self.down_hadamard)
        return ops.linear(inner, self.down)

    @property
    def weights(self) -> list[LinearWeight]:
        """All packed matrices."""
        return [self.gate_up, self.down]


@dataclass(slots=True, eq=False, kw_only=True)
class MLP:
    """down(act(up(x)))."""

    up: LinearWeight  # [I, H]
    down: LinearWeight  # [H, I]
    activation: str

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        return ops.linear(ops.activate(ops.linear(x, self.up), self.activation), self.down)

    @property
    def weights(self) -> list[LinearWeight]:
        """All packed matrices."""
        return [self.up, self.down]


@dataclass(slots=True, eq=False, kw_only=True)
class Experts:
    """A router and gated MLPs, a few of them for each token."""

    moe: MoeWeights

    def forward(self, ops: Ops, x: Value) -> Value:
        """[N, H] -> [N, H]."""
        return ops.moe(x, self.moe)

    @property
    def weights(self) -> list[LinearWeight]:
        """All packed matrices."""
        return [self.moe.router, *self.moe.gate_up, *self.moe.down]
