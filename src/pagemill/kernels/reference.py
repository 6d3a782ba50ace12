"""Every op in PyTorch's own functions: what the native kernels are checked against, and what runs without them.

Owns the meaning of each op. Runs on any device PyTorch has; keeps no state but the KV tensors it is given. Anything
that sums over many elements does so in float32. Clarity comes before speed here; one request never mixes with another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pagemill.errors import UnsupportedModelError
from pagemill.kernels.ops import AttentionSpec, LinearWeight, MoeWeights, StepInputs

__all__ = [
    "ACTIVATIONS",
    "KVLayer",
    "ReferenceOps",
    "activate",
    "apply_rope",
    "attention_steps",
    "experts",
    "from_bytes",
    "gated",
    "hadamard",
    "layer_norm",
    "linear_group",
    "linear_int8",
    "paged_attention",
    "rms_norm",
    "softcap",
    "to_bytes",
]

QUERY_TILE = 256
"""Queries scored at once; bounds the score matrix of a long chunk."""

HADAMARD_TILE = 512
"""Largest Hadamard matrix that is multiplied with as it is."""

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class KVLayer:
    """One layer's part of the KV cache.

    int8: each key and value of a token and KV head has its own scale, keys after a Hadamard transform of the head,
    since a few of their dimensions are much larger than the rest.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Not filled: on a CPU the pages cost nothing until a request writes them."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        # keys and values, one after the other
        self.tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]  # [blocks, size, Hkv, D]
        self.scales: list[torch.Tensor] = []  # [num_blocks, block_size, Hkv, 1] each; none where dtype is a float
        if dtype == torch.int8:
            self.scales = [torch.empty((*shape[:3], 1), dtype=torch.bfloat16, device=device) for _ in range(2)]
        self._hadamard_block = head_dim & -head_dim

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.tensors[0].shape[1]

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [n, Hkv, D] of the tokens at ``slots`` [n]."""
        if not self.scales:
            for tensor, new in zip(self.tensors, (keys, values), strict=True):
                tensor.flatten(0, 1)[slots] = new.to(tensor.dtype)
            return
        new_bytes = (to_bytes(hadamard(keys, self._hadamard_block)), to_bytes(values))
        for tensor, scales, (steps, scale) in zip(self.tensors, self.scales, new_bytes, strict=True):
            tensor.flatten(0, 1)[slots] = steps
            scales.flatten(0, 1)[slots] = scale

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks: float32 [len(blocks) * block_size, Hkv, D] each."""
        if not self.scales:
            keys, values = (tensor[blocks].flatten(0, 1).float() for tensor in self.tensors)
            return keys, values
        keys, values = (
            from_bytes(tensor[blocks], scales[blocks]).flatten(0, 1)
            for tensor, scales in zip(self.tensors, self.scales, strict=True)
        )
        return hadamard(keys, self._hadamard_block), values

    def copy_block(self, source: int, target: int) -> None:
        """All of one block."""
        for tensor in (*self.tensors, *self.scales):
            tensor[target] = tensor[source]


def to_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as int8 and a bfloat16 scale [..., 1], rounded up so that no value lies beyond 127 steps."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    rounded = scale.bfloat16()
    up = torch.where(rounded.float() < scale, torch.nextafter(rounded, rounded.new_tensor(math.inf)), rounded)
    return (x.float() / up.float()).round().to(torch.int8), up


def from_bytes(steps: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., D]."""
    return steps.float() * scale.float()


def rounded(x: torch.Tensor, size: int, pairs: bool = False) -> torch.Tensor:
    """Each run of ``size`` values of x [N, K] in 127 steps to either side, as products of integers see it: float32.

    ``pairs``: the sums of neighbours, too, lie within 127 steps (csrc/linear/linear.h says where and why).
    """
    runs = F.pad(x, (0, -x.shape[1] % size)).view(len(x), -(-x.shape[1] // size), size)
    largest = runs.abs().amax(2, keepdim=True)
    if pairs:
        even = F.pad(runs, (0, size % 2))
        largest = torch.maximum(largest, (even[..., ::2] + even[..., 1::2]).abs().amax(2, keepdim=True))
    steps = (runs * (torch.full_like(largest, 127.0) / largest)).round().nan_to_num(0.0)  # 0 / 0 where all are 0
    return (steps * (largest / 127)).flatten(1)[:, : x.shape[1]]


def linear_int8(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, pairs: bool = False
) -> torch.Tensor:
    """x [N, K], each row rounded to int8, times int8 weights q [M, K] with a scale [M] each, + bias: [N, M].

    ``pairs``: see rounded().
    """
    return F.linear(rounded(x, x.shape[1], pairs), q.float() * scale[:, None], bias)


def linear_group(
    x: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    zero: int,
    group: int,
    *,
    pairs: bool = False,
) -> torch.Tensor:
    """x [N, K], each 32 values rounded to int8, times weights kept as small integers q uint8 [M, K]: [N, M].

    A weight is (q - zero) * scale, or q * scale + minimum; scale and minimum [M, ceil(K / group)]. ``pairs``: see
    rounded().
    """
    spread = scale.repeat_interleave(group, 1)[:, : q.shape[1]]
    if minimum is None:
        weights = (q.float() - zero) * spread
    else:
        weights = q * spread + minimum.repeat_interleave(group, 1)[:, : q.shape[1]]
    return F.linear(rounded(x, 32, pairs), weights)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in float32, in x's type."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, computed in float32, in x's type."""
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """gelu (the exact one) or tanh, in float32, in x's type."""
    return (F.gelu(x.float()) if activation == "gelu" else torch.tanh(x.float())).to(x.dtype)


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of [N, 2 I] -> [N, I], in float32, in the input's type."""
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"activation {activation!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def apply_rope(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first dimensions of each head: x [N, heads, D], table [max_positions, 2, rotary_dim / 2]."""
    cos, sin = table[positions].float().unsqueeze(1).unbind(2)  # [N, 1, half] each
    half = cos.shape[-1]
    turned, kept = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)


def paged_attention(q: torch.Tensor, cache: KVLayer, inputs: StepInputs, spec: AttentionSpec) -> torch.Tensor:
    """Attention of each row's queries over its own cached keys: q [N, Hq, D] -> [N, Hq, D]."""
    group, window = spec.group, spec.window
    out = torch.empty_like(q)
    starts = inputs.query_start.tolist()
    lengths = inputs.context_lens.tolist()
    for row, length in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        for low in range(first, last, QUERY_TILE):
            high = min(low + QUERY_TILE, last)
            position = length - (last - low)  # of the tile's first query
            seen = 0 if window is None else max(0, position - window + 1)
            newest = position + high - low if spec.causal else length
            keys, values = _gather(cache, inputs.block_tables[group][row], seen, newest)
            out[low:high] = _attend(q[low:high], keys, values, position - seen, spec)
    return out


def _gather(cache: KVLayer, table: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions low .. high, through the row's block table: float32 [high - low, Hkv, D] each."""
    size = cache.block_size
    blocks = table[low // size : -(-high // size)].long()
    inside = slice(low % size, low % size + high - low)
    keys, values = cache.read(blocks)
    return keys[inside], values[inside]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """q [n, Hq, D], its first query standing at index ``first`` of keys and values [T, Hkv, D]."""
    n, num_heads, dim = q.shape
    total, num_kv_heads, _ = keys.shape
    grouped = q.float().view(n, num_kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    scores = (grouped.flatten(1, 2) @ keys.permute(1, 2, 0)).view(num_kv_heads, -1, n, total)
    scores = softcap(scores * spec.scale, spec.softcap)
    if spec.causal:
        distance = torch.arange(first, first + n, device=q.device)[:, None] - torch.arange(total, device=q.device)
        hidden = distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    mixed = weights.flatten(1, 2) @ values.permute(1, 0, 2)  # [Hkv, G n, D]
    return mixed.view(num_kv_heads, -1, n, dim).permute(2, 0, 1, 3).reshape(n, num_heads, dim).to(q.dtype)


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each run of ``block`` values times the orthonormal Walsh-Hadamard matrix in natural order, in x's type.

    A large block is the Kronecker product of two smaller ones: one along its inner values, one across them.
    """
    inner = min(block, HADAMARD_TILE)
    y = x.float().reshape(-1, inner) @ _hadamard_matrix(inner, x.device)
    if inner < block:
        across = y.view(-1, block // inner, inner).transpose(1, 2)
        y = hadamard(across.reshape(-1, block // inner), block // inner).view(across.shape).transpose(1, 2)
    return y.reshape(x.shape).to(x.dtype)


@functools.lru_cache(maxsize=16)
def _hadamard_matrix(size: int, device: torch.device) -> torch.Tensor:
    """Float32 [size, size]."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), matrix)
    return matrix / math.sqrt(size)


def experts(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """Each token through its best experts, summed by the router's probabilities: [N, H] -> [N, H]."""
    probabilities = weights.router.apply(x).float().softmax(-1)  # [N, E]
    chosen, which = probabilities.topk(weights.experts_per_token, dim=-1)  # [N, k]
    if weights.renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(which.flatten().tolist())):
        tokens, slot = (which == expert).nonzero(as_tuple=True)
        inner = gated(weights.gate_up[expert].apply(x[tokens]), weights.activation)
        if weights.down_hadamard:
            inner = hadamard(inner, weights.down_hadamard)
        partial = weights.down[expert].apply(inner).float() * chosen[tokens, slot, None]
        out.index_add_(0, tokens, partial)
    return out.to(x.dtype)


class ReferenceOps:
    """:class:`pagemill.kernels.ops.Ops` over one step's inputs and the KV tensors of all layers."""

    def __init__(self, step: StepInputs, kv_caches: Sequence[KVLayer]) -> None:
        self.step = step
        self.kv_caches = kv_caches  # one per layer

    def embed(self, table: LinearWeight, scale: float) -> torch.Tensor:
        """Rows of the table: [N, H]."""
        rows = table.rows(self.step.token_ids)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def positions(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of the table: [N, H]."""
        return table[self.step.positions.long()]

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        return layer_norm(x, weight, bias, eps)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        return activate(x, activation)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        return rms_norm(x, weight, eps)

    def add(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """x + scale * y."""
        return torch.add(x, y, alpha=scale)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        return weight.apply(x)

    def gated_linear(self, x: torch.Tensor, weight: LinearWeight, activation: str) -> torch.Tensor:
        """[N, in] -> [N, out / 2]."""
        return gated(weight.apply(x), activation)

    def hadamard(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """[N, K] -> [N, K]."""
        return hadamard(x, block)

    def rope_and_cache(self, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """[N, (Hq + 2 Hkv) D] -> q [N, Hq D]; k and v go to the cache."""
        dim, kv_width = spec.head_dim, spec.num_kv_heads * spec.head_dim
        q, k, v = torch.split(qkv, [spec.num_heads * dim, kv_width, kv_width], dim=-1)
        q = self._norm_and_rotate(q, spec.q_norm, spec)
        k = self._norm_and_rotate(k, spec.k_norm, spec)
        slots = self.step.slot_mapping[spec.group].long()
        self.kv_caches[spec.layer].write(slots, k, v.reshape(-1, spec.num_kv_heads, dim))
        return q.flatten(1)

    def _norm_and_rotate(self, x: torch.Tensor, norm: torch.Tensor | None, spec: AttentionSpec) -> torch.Tensor:
        if norm is not None and norm.numel() != spec.head_dim:
            x = rms_norm(x, norm, spec.norm_eps)
        x = x.reshape(x.shape[0], x.shape[1] // spec.head_dim, spec.head_dim)
        if norm is not None and norm.numel() == spec.head_dim:
            x = rms_norm(x, norm, spec.norm_eps)
        if spec.rope is None:
            return x
        assert spec.rope_table is not None
        return apply_rope(x, spec.rope_table, self.step.positions, spec.rope.interleaved)

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """[N, Hq D] -> [N, Hq D]."""
        heads = q.view(-1, spec.num_heads, spec.head_dim)
        cache = self.kv_caches[spec.layer]
        return paged_attention(heads, cache, self.step, spec).flatten(1)

    def moe(self, x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
        """[N, H] -> [N, H]."""
        return experts(x, weights)

    def select_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [L, H]."""
        return x[self.step.logits_rows.long()]

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [L, H]."""
        return x.float()

    def logits(self, x: torch.Tensor, weight: LinearWeight, scale: float, softcap_at: float | None) -> torch.Tensor:
        """float32 [L, V]."""
        return softcap(weight.apply(x.float()) * scale, softcap_at)


def attention_steps(
    spec: AttentionSpec, steps: Sequence[tuple[torch.Tensor, StepInputs]], num_blocks: int, block_size: int
) -> torch.Tensor:
    """Steps of one layer over one cache, float32: their outputs one after another [tokens, Hq D]."""
    cache = [KVLayer(num_blocks, block_size, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu"))]
    results = []
    for qkv, inputs in steps:
        ops = ReferenceOps(inputs, cache)
        results.append(ops.attend(ops.rope_and_cache(qkv, spec), spec))
    return torch.cat(results)
