"""How memory is divided: weights, activations, logits, KV cache; and the longest context that fits.

A pure function of numbers (:func:`plan_memory`), so that ``pagemill plan`` and the tests need no model and no device.
Must not read memory itself or allocate any: platform.py measures, the runner allocates.

Terms, all in bytes::

    budget  = min(utilization * total, available)
    left    = budget - weights - activations - logits - runtime
    need(L) = sum over groups of bytes_per_block * blocks that one request of L tokens holds
    KV      = given, or min(left, need(max_model_len) * max_num_seqs, share of the total that the platform allows)
    blocks  = each group's part of KV in proportion to what a request of full length needs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pagemill.config import EngineConfig
from pagemill.core.kv_cache import KVCacheSpec
from pagemill.errors import ConfigError, MemoryPlanError
from pagemill.model_config import ModelConfig
from pagemill.platform import MemoryInfo

__all__ = ["MAX_PROMPT_LOGITS", "MemoryPlan", "activation_bytes", "kv_specs", "plan_memory"]

RUNTIME_BYTES = 192 << 20
"""Interpreter, PyTorch and what the allocator keeps besides the terms."""
MAX_PROMPT_LOGITS = 128
"""Prompt positions whose logits are in memory at once; a longer chunk with prompt_logprobs is computed in parts."""
MIN_MODEL_LEN = 64
"""Less context than this is not worth starting for (or the model's own length, or the one asked for)."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What goes where. All sizes in bytes, lengths in tokens."""

    total_bytes: int
    available_bytes: int
    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    logits_bytes: int
    runtime_bytes: int
    specs: tuple[KVCacheSpec, ...]
    """The KV cache groups, with their numbers of blocks."""
    max_model_len: int
    max_num_seqs: int
    max_concurrency: float
    """Requests of max_model_len that the KV cache holds at once."""
    kv_source: str
    """What decided the size of the KV cache, in words."""
    logits_note: str = ""
    """What the logits (or vectors) are for, in words."""
    notes: tuple[str, ...] = field(default=())
    """What was lowered, and why."""

    @property
    def kv_bytes(self) -> int:
        """All KV blocks."""
        return sum(spec.num_blocks * spec.bytes_per_block for spec in self.specs)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the group with the fewest slots holds."""
        return min(spec.num_blocks * spec.block_size for spec in self.specs)

    def render(self) -> str:
        """The plan as lines of text, term by term."""
        kinds = ", ".join(
            f"{spec.num_blocks:,} x {spec.block_size} tokens" + (f" (window {spec.window:,})" if spec.window else "")
            for spec in self.specs
        )
        rows = [
            ("memory", self.total_bytes, f"{_size(self.available_bytes)} available"),
            ("budget", self.budget_bytes, "may be used in all"),
            ("weights", self.weight_bytes, ""),
            ("activations", self.activation_bytes, "at the largest step"),
            ("logits", self.logits_bytes, self.logits_note),
            ("runtime", self.runtime_bytes, "interpreter and libraries"),
            ("KV cache", self.kv_bytes, f"{self.kv_source}; touched as requests fill it"),
        ]
        lines = ["Memory plan"]
        lines += [f"  {name:<12}{_size(size):>10}  {note}".rstrip() for name, size, note in rows]
        lines.append(f"  {'blocks':<12}{sum(spec.num_blocks for spec in self.specs):>10,}  {kinds}")
        lines.append(
            f"  {'context':<12}{self.max_model_len:>10,}  tokens at most; {self.max_concurrency:.1f} requests of that "
            f"length at once ({self.kv_tokens:,} tokens)"
        )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def kv_specs(model: ModelConfig, block_size: int, layer_block_bytes: int) -> tuple[KVCacheSpec, ...]:
    """The model's KV cache groups, without blocks yet: full attention first if there is any, then each window size.

    ``layer_block_bytes``: what one block of one layer takes in the backend's layout.
    """
    if not model.causal:  # nothing outlives a step: each layer takes over the memory of the one before
        every = tuple(range(model.num_layers))
        one = KVCacheSpec(
            kind="full", layers=every, block_size=block_size, bytes_per_block=layer_block_bytes, num_blocks=0
        )
        return (one,)
    layers: dict[int | None, list[int]] = {}
    for index, layer in enumerate(model.layers):
        layers.setdefault(layer.window, []).append(index)
    return tuple(
        KVCacheSpec(
            kind="full" if window is None else "window",
            layers=tuple(ids),
            block_size=block_size,
            window=window,
            bytes_per_block=layer_block_bytes * len(ids),
            num_blocks=0,
        )
        for window, ids in sorted(layers.items(), key=lambda pair: pair[0] or 0)
    )


def activation_bytes(model: ModelConfig, num_tokens: int) -> int:
    """Most that one block of the decoder keeps alive at once, in float32: residual, normed, qkv, gate-up."""
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widths = [3 * model.intermediate_size]
    for layer in model.layers:
        if layer.moe is not None:
            widths.append(3 * layer.moe.intermediate_size * layer.moe.num_experts_per_token)
    return 4 * num_tokens * (4 * model.hidden_size + heads + max(widths))


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    memory: MemoryInfo,
    weight_bytes: int,
    activation_bytes: int,
    specs: Sequence[KVCacheSpec],
    kv_share: float = 1.0,
    max_positions: int | None = None,
) -> MemoryPlan:
    """Divide the memory. ``memory`` was measured before the weights were loaded.

    ``max_positions``: what the model can go to, where that is more than its usual length. Raises :class:`ConfigError`
    for a length beyond it and :class:`MemoryPlanError` where not even one short request fits.
    """
    asked = config.max_model_len or model.usual_context or model.max_position_embeddings
    limit = max_positions or model.max_position_embeddings
    if asked > limit:
        raise ConfigError(
            f"--max-model-len={asked} is more than the model's {limit} positions; use at most --max-model-len={limit}"
        )
    wanted = asked if model.causal else min(asked, config.max_num_batched_tokens)  # an encoder's input is one step
    logits_bytes, logits_note = _result(config, model)
    budget = min(int(config.gpu_memory_utilization * memory.total_bytes), memory.available_bytes)
    left = max(0, budget - weight_bytes - activation_bytes - logits_bytes - RUNTIME_BYTES)
    chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
    sizing = _Sizing(tuple(specs), min(chunk, config.max_num_batched_tokens))
    if config.num_gpu_blocks_override is not None:
        blocks = (config.num_gpu_blocks_override,) * len(specs)
        length, least, source = sizing.longest(blocks, wanted), 1, "--num-gpu-blocks-override"
    else:
        kv_bytes, source = _kv_bytes(config, sizing, wanted, left, int(kv_share * memory.total_bytes))
        length, least = sizing.longest_in(kv_bytes, wanted), min(MIN_MODEL_LEN, wanted)
        blocks = sizing.divide(kv_bytes, length, config.max_num_seqs)
        left = kv_bytes
    plan = MemoryPlan(
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        logits_bytes=logits_bytes,
        runtime_bytes=RUNTIME_BYTES,
        specs=tuple(msgspec.structs.replace(s, num_blocks=n) for s, n in zip(specs, blocks, strict=True)),
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_concurrency=sizing.concurrency(blocks, length),
        kv_source=source,
        logits_note=logits_note,
        notes=_notes(config, asked, wanted, length),
    )
    if length < least:
        raise MemoryPlanError(_refusal(plan, sizing.bytes_for(least), left, least))
    return plan


@dataclass(frozen=True)
class _Sizing:
    """Arithmetic between bytes, blocks and lengths."""

    specs: tuple[KVCacheSpec, ...]
    max_chunk: int

    def blocks_for(self, length: int) -> tuple[int, ...]:
        return tuple(spec.max_blocks(length, self.max_chunk) for spec in self.specs)

    def bytes_for(self, length: int) -> int:
        return sum(n * s.bytes_per_block for n, s in zip(self.blocks_for(length), self.specs, strict=True))

    def divide(self, kv_bytes: int, length: int, max_num_seqs: int) -> tuple[int, ...]:
        """Each group's blocks, in proportion to the need of a request of ``length``."""
        need, each = self.blocks_for(length), max(1, self.bytes_for(length))
        return tuple(min(n * max_num_seqs, kv_bytes * n // each) for n in need)

    def longest(self, blocks: tuple[int, ...], most: int) -> int:
        """The longest request, up to ``most`` tokens, that these blocks hold."""
        return self._search(most, lambda n: all(a <= b for a, b in zip(self.blocks_for(n), blocks, strict=True)))

    def longest_in(self, kv_bytes: int, most: int) -> int:
        """The longest request, up to ``most`` tokens, whose blocks take no more than ``kv_bytes``."""
        return self._search(most, lambda n: self.bytes_for(n) <= kv_bytes)

    @staticmethod
    def _search(most: int, fits: Callable[[int], bool]) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def concurrency(self, blocks: tuple[int, ...], length: int) -> float:
        return min(have / max(1, need) for have, need in zip(blocks, self.blocks_for(length), strict=True))


def _kv_bytes(config: EngineConfig, sizing: _Sizing, length: int, left: int, share: int) -> tuple[int, str]:
    """The size of the KV cache and what decided it."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    one = sizing.bytes_for(length)
    candidates = [
        (one * config.max_num_seqs, f"{config.max_num_seqs:,} requests of full length"),
        (left, "all that is left"),
        # A share too small for one request would only shorten it, with memory lying idle.
        (max(share, one), "the default's share; more with --kv-cache-memory-bytes"),
    ]
    return min(candidates, key=lambda pair: pair[0])


def _result(config: EngineConfig, model: ModelConfig) -> tuple[int, str]:
    """Bytes of what a step ends with, float32, and what they are for."""
    if model.pooling is not None:
        rows = config.max_num_batched_tokens if model.pooling.kind == "mean" else config.max_num_seqs
        return 4 * rows * max(model.hidden_size, model.pooling.num_scores), f"{rows:,} vectors, no logits"
    # Those of sampled rows as computed and as filtered.
    rows = 2 * config.max_num_seqs + MAX_PROMPT_LOGITS
    return 4 * model.vocab_size * rows, f"{config.max_num_seqs:,} rows, twice; {MAX_PROMPT_LOGITS} prompt positions"


def _notes(config: EngineConfig, positions: int, wanted: int, length: int) -> tuple[str, ...]:
    if positions > wanted:
        return (
            f"an encoder's input is computed in one step of at most --max-num-batched-tokens="
            f"{config.max_num_batched_tokens:,}; the context of {positions:,} is lowered to {min(wanted, length):,}",
        )
    if length >= wanted:
        return ()
    asked = "--max-model-len" if config.max_model_len is not None else "the model's context"
    return (
        f"{asked} of {wanted:,} tokens does not fit; lowered to {length:,}. More memory, --kv-cache-memory-bytes or "
        "--gpu-memory-utilization raise it",
    )


def _refusal(plan: MemoryPlan, need: int, left: int, length: int) -> str:
    fixed = plan.weight_bytes + plan.activation_bytes + plan.logits_bytes + plan.runtime_bytes
    return (
        f"not enough memory for one request of {length} tokens: its KV cache needs {_size(need)} and has {_size(left)} "
        f"({plan.kv_source}); {_size(plan.budget_bytes)} may be used, and weights, activations, logits and runtime "
        f"take {_size(fixed)}. Free memory, raise --gpu-memory-utilization or --kv-cache-memory-bytes, or lower "
        "--max-num-seqs, --max-num-batched-tokens or the model's size"
    )


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
