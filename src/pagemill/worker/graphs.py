"""A model's step, recorded once and replayed by one native call.

Owns the recording (:class:`Recorder` is an Ops that computes nothing), the fusions, and the native program that comes
out. Must not know how a kernel works; what a kernel may be fused with is all that is said here.

Fusions, found from who reads which value:

- a norm becomes part of preparing the rows for the product that reads it (rounded or quantised as the weights want);
- a product that is only added to the residual stream adds into it;
- gate and up are one product, with the activation in its epilogue;
- what follows the last attention is computed for the rows that need logits alone.

A weight is anything with ``packed``, the native matrix that holds it (packed as gated where it stacks gate and up).
Other weights are packed here, from their dequantised rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pagemill import _native
from pagemill.kernels.ops import AttentionSpec, LinearWeight, MoeWeights

__all__ = ["Node", "Recorder", "compile_program"]

TILE_ROWS = 64
"""Rows that run through a segment together: their activations fit the L2 caches, and weights are read once for them."""


@dataclass(slots=True, eq=False)
class Node:
    """A value of the recorded step."""

    op: str
    inputs: tuple[Node, ...]
    columns: int
    index: int
    args: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """An :class:`~pagemill.kernels.ops.Ops` whose values are nodes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def _node(self, op: str, inputs: tuple[Node, ...], columns: int, **args: Any) -> Node:
        node = Node(op, inputs, columns, len(self.nodes), args)
        self.nodes.append(node)
        return node

    def embed(self, table: LinearWeight, scale: float) -> Node:
        """Rows of the table."""
        return self._node("embed", (), table.in_features, weight=table, scale=scale)

    def positions(self, table: torch.Tensor) -> Node:
        """Rows of the position table."""
        return self._node("positions", (), table.shape[1], table=table)

    def layer_norm(self, x: Node, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Node:
        """Over the last dimension."""
        return self._node("layer_norm", (x,), x.columns, weight=weight, bias=bias, eps=eps)

    def activate(self, x: Node, activation: str) -> Node:
        """Element by element."""
        return self._node("activate", (x,), x.columns, activation=activation)

    def rms_norm(self, x: Node, weight: torch.Tensor, eps: float) -> Node:
        """Over the last dimension."""
        return self._node("rms_norm", (x,), x.columns, weight=weight, eps=eps)

    def add(self, x: Node, y: Node, scale: float = 1.0) -> Node:
        """The residual."""
        return self._node("add", (x, y), x.columns, scale=scale)

    def linear(self, x: Node, weight: LinearWeight) -> Node:
        """A matrix product."""
        return self._node("linear", (x,), weight.out_features, weight=weight)

    def gated_linear(self, x: Node, weight: LinearWeight, activation: str) -> Node:
        """act(gate) * up."""
        return self._node("gated", (x,), weight.out_features // 2, weight=weight, activation=activation)

    def hadamard(self, x: Node, block: int) -> Node:
        """Block by block."""
        return self._node("hadamard", (x,), x.columns, block=block)

    def rope_and_cache(self, qkv: Node, spec: AttentionSpec) -> Node:
        """Rotated queries; keys and values go to the cache."""
        return self._node("rope", (qkv,), qkv.columns, spec=spec)

    def attend(self, q: Node, spec: AttentionSpec) -> Node:
        """Attention over the cache."""
        return self._node("attend", (q,), spec.num_heads * spec.head_dim, spec=spec)

    def moe(self, x: Node, weights: MoeWeights) -> Node:
        """Mixture of experts."""
        return self._node("moe", (x,), x.columns, weights=weights)

    def select_rows(self, x: Node) -> Node:
        """The rows that need logits."""
        return self._node("select", (x,), x.columns)

    def result(self, x: Node) -> Node:
        """The step's result where there are no logits."""
        return self._node("result", (x,), x.columns)

    def logits(self, x: Node, weight: LinearWeight, scale: float, softcap: float | None) -> Node:
        """The step's result."""
        return self._node("logits", (x,), weight.out_features, weight=weight, scale=scale, softcap=softcap)


def compile_program(
    recorder: Recorder,
    caches: list[torch.Tensor],
    layers: list[_native.AttentionLayer],
    *,
    max_tokens: int,
    max_logits: int,
) -> _native.Program:
    """The recorded step as a native program; ``caches`` and ``layers`` hold one entry for each decoder layer."""
    return _Lowering(recorder.nodes, caches, layers, max_tokens, max_logits).run()


class _Lowering:
    """From nodes to instructions, in order. A node's floats live in a buffer; the residual stream stays in one."""

    def __init__(
        self,
        nodes: list[Node],
        caches: list[torch.Tensor],
        layers: list[_native.AttentionLayer],
        max_tokens: int,
        max_logits: int,
    ) -> None:
        self.nodes = nodes
        self.caches = caches
        self.layers = layers
        self.program = _native.Program(max_tokens, max_logits, TILE_ROWS)
        self.readers: dict[Node, list[Node]] = {node: [] for node in nodes}
        for node in nodes:
            for value in node.inputs:
                self.readers[value].append(node)
        self.last_attend = max((node.index for node in nodes if node.op == "attend"), default=-1)
        self.floats: dict[Node, int] = {}
        self.prepared: dict[tuple[Node, str, bool], int] = {}
        self.packed: dict[tuple[LinearWeight, bool], _native.PackedLinear] = {}

    def run(self) -> _native.Program:
        """Emit everything."""
        for node in self.nodes:
            emit = getattr(self, f"_{node.op}")
            emit(node)
        self.program.finish()
        return self.program

    # ---- values -----------------------------------------------------------------------------------------------------

    def _late(self, node: Node) -> bool:
        """Whether a node is computed for the rows with logits alone."""
        return node.index > self.last_attend

    def _new_floats(self, node: Node) -> int:
        self.floats[node] = self.program.floats(node.columns, logits=self._late(node))
        return self.floats[node]

    def _rows(self, node: Node, reader: Node, **to: Any) -> None:
        """Bring a node's rows into the form that a reader wants, through the norm and the transform between."""
        source, norm, eps, hadamard = node, None, 0.0, 0
        if source not in self.floats and source.op == "hadamard":
            source, hadamard = source.inputs[0], source.args["block"]
        while source not in self.floats and source.op in ("rms_norm", "select"):
            if source.op == "rms_norm":
                assert norm is None, "a norm of a norm needs a value between them"
                norm, eps = source.args["weight"], source.args["eps"]
            source = source.inputs[0]
        assert source in self.floats, f"{source.op} was read before it was computed"
        late = self._late(reader)
        self.program.rows(
            self.floats[source],
            node.columns,
            norm=None if norm is None else norm.float().contiguous(),
            eps=eps,
            hadamard=hadamard,
            gather=late and not self._late(source),
            logits=late,
            **to,
        )

    def _floats_for(self, node: Node, reader: Node) -> int:
        """A buffer with the node's floats, in the reader's rows."""
        if node in self.floats and self._late(node) == self._late(reader):
            return self.floats[node]
        out = self.program.floats(node.columns, logits=self._late(reader))
        self._rows(node, reader, out=out)
        return out

    def _packed(self, weight: LinearWeight, gated: bool = False) -> _native.PackedLinear:
        found: _native.PackedLinear | None = getattr(weight, "packed", None)
        if found is None:
            found = self.packed.get((weight, gated))
        if found is None:
            found = self.packed[weight, gated] = _pack(weight, gated)
        assert found.gated == gated, "a weight that stacks gate and up must be packed as gated, others must not"
        return found

    def _act(self, node: Node, reader: Node, packed: _native.PackedLinear) -> int:
        """The node's rows, prepared for a product."""
        key = (node, packed.activation_kind, self._late(reader))
        if key not in self.prepared:
            act = self.program.activation(packed, logits=self._late(reader))
            self._rows(node, reader, act=act, weight=packed)
            self.prepared[key] = act
        return self.prepared[key]

    # ---- one method a kind of node ----------------------------------------------------------------------------------

    def _embed(self, node: Node) -> None:
        self.program.embed(self._packed(node.args["weight"]), node.args["scale"], self._new_floats(node))

    def _rms_norm(self, node: Node) -> None:
        """Left to its readers."""

    def _hadamard(self, node: Node) -> None:
        """Left to its readers."""

    def _select(self, node: Node) -> None:
        """Left to its readers, or done long before: what follows the last attention has the right rows already."""

    def _positions(self, node: Node) -> None:
        self.program.positions(node.args["table"].float().contiguous(), self._new_floats(node))

    def _layer_norm(self, node: Node) -> None:
        """Computed once, unlike an RMS norm: its value is the residual stream too."""
        source = self._floats_for(node.inputs[0], node)
        weight, bias = (node.args[name].float().contiguous() for name in ("weight", "bias"))
        self.program.layer_norm(source, self._new_floats(node), weight, bias, node.args["eps"], logits=self._late(node))

    def _activate(self, node: Node) -> None:
        """In place: a product's output has no other reader."""
        assert self.readers[node.inputs[0]] == [node]
        self.floats[node] = self._floats_for(node.inputs[0], node)
        self.program.activate(self.floats[node], node.columns, node.args["activation"], logits=self._late(node))

    def _linear(self, node: Node) -> None:
        readers = self.readers[node]
        if (
            len(readers) == 1
            and readers[0].op == "add"
            and self._adds_into(readers[0])
            and readers[0].inputs[1] is node
        ):
            return  # emitted by the add
        self._product(node, self._new_floats(node), accumulate=False)

    def _product(self, node: Node, out: int, *, accumulate: bool) -> None:
        weight = node.args["weight"]
        packed = self._packed(weight)
        act = self._act(node.inputs[0], node, packed)
        self.program.linear(act, packed, out, accumulate=accumulate, logits=self._late(node))

    def _gated(self, node: Node) -> None:
        weight = node.args["weight"]
        packed = self._packed(weight, gated=True)
        act = self._act(node.inputs[0], node, packed)
        self.program.linear(act, packed, self._new_floats(node), gate=node.args["activation"], logits=self._late(node))

    def _adds_into(self, add: Node) -> bool:
        """Whether an add's first operand may be overwritten by the product that is its second."""
        x = add.inputs[0]
        return add.args["scale"] == 1.0 and self.readers[x][-1] is add and x.op != "rms_norm"

    def _add(self, node: Node) -> None:
        x, y = node.inputs
        into = self._floats_for(x, node)
        if self.readers[x][-1] is not node and into == self.floats.get(x):
            into = self._new_floats(node)
            self._rows(x, node, out=into)
        self.floats[node] = into
        if y.op == "linear" and y not in self.floats:
            self._product(y, into, accumulate=True)
        else:
            other = self._floats_for(y, node)
            self.program.add(into, other, node.columns, node.args["scale"], logits=self._late(node))

    def _rope(self, node: Node) -> None:
        spec: AttentionSpec = node.args["spec"]
        self.floats[node] = self.floats[node.inputs[0]]  # in place: the query part is rotated where it lies
        self.program.rope(
            self.floats[node],
            self.layers[spec.layer],
            self.caches[spec.layer],
            spec.group,
            spec.rope_table,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            q_norm=None if spec.q_norm is None else spec.q_norm.float().contiguous(),
            k_norm=None if spec.k_norm is None else spec.k_norm.float().contiguous(),
            eps=spec.norm_eps,
        )

    def _attend(self, node: Node) -> None:
        spec: AttentionSpec = node.args["spec"]
        query = self.floats[node.inputs[0]]
        layer, cache = self.layers[spec.layer], self.caches[spec.layer]
        self.program.attention(query, self._new_floats(node), layer, cache, spec.group)

    def _moe(self, node: Node) -> None:
        weights: MoeWeights = node.args["weights"]
        late = self._late(node)
        router = self._packed(weights.router)
        scores = self.program.floats(router.n, logits=late)
        self.program.linear(self._act(node.inputs[0], node, router), router, scores, logits=late)
        gate_up = [self._packed(weight, gated=True) for weight in weights.gate_up]
        act = self._act(node.inputs[0], node, gate_up[0])
        self.program.moe(
            scores,
            act,
            self._new_floats(node),
            gate_up,
            [self._packed(weight) for weight in weights.down],
            top_k=weights.experts_per_token,
            renormalize=weights.renormalize,
            down_hadamard=weights.down_hadamard,
            gate=weights.activation,
            logits=late,
        )

    def _result(self, node: Node) -> None:
        self._rows(node.inputs[0], node, result=True)

    def _logits(self, node: Node) -> None:
        weight = node.args["weight"]
        packed = self._packed(weight)
        act = self._act(node.inputs[0], node, packed)
        scale, softcap = node.args["scale"], node.args["softcap"] or 0.0
        changed = scale != 1.0 or softcap != 0.0
        self.program.linear(act, packed, -1, logits=True, find_best=not changed)
        if changed:
            self.program.scale_softcap(node.columns, scale, softcap)


def _pack(weight: LinearWeight, gated: bool) -> _native.PackedLinear:
    """A weight without native memory of its own: bfloat16 if that loses nothing, else float32."""
    rows = weight.dequantize()
    kind: Literal["bf16", "f32"] = "bf16" if torch.equal(rows.bfloat16().float(), rows) else "f32"
    bias = getattr(weight, "bias", None)
    packed = _native.PackedLinear(kind, rows.shape[0], rows.shape[1], gated=gated, bias=bias is not None)
    packed.write_floats(0, rows)
    if bias is not None:
        packed.write_bias(0, bias.float().contiguous())
    return packed
