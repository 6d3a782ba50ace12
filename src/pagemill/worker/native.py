"""The native backend: a model's step recorded into a program, over KV memory in the kernels' own layout.

Owns the native KV cache (opaque bytes, see csrc/ops/attention.h) and the logits buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagemill import _native
from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import BlockCopy
from pagemill.kernels.ops import StepInputs
from pagemill.model_config import ModelConfig
from pagemill.models.encoder import Model
from pagemill.sampling.native import empty_extremes
from pagemill.worker.backend import Computed
from pagemill.worker.graphs import Recorder, compile_program

__all__ = ["NativeBackend"]

KV_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}


WARM_BYTES = 512 << 20
"""KV memory, in the lowest blocks of all layers where a new server's requests land, that is backed with pages ahead of
use: first writes took 8 % of a first run."""


def step_logits(rows: int, vocab_size: int) -> torch.Tensor:
    """Uninitialised [rows, vocab_size] float32 whose rows never begin at the same place of a cache.

    A vocabulary is often a multiple of 1,024: rows side by side would all fall into the same few cache sets, and a
    product that writes a column of many rows would evict its own lines (a fifth of its time, measured).
    """
    stride = -(-vocab_size // 1024) * 1024 + 64
    return torch.empty(rows, stride)[:, :vocab_size]


class NativeBackend:
    """One native call a step."""

    name = "native"

    @staticmethod
    def layer_block_bytes(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> int:
        """Keys and values of one block of one layer."""
        return _native.kv_block_bytes(KV_TYPES[kv_dtype], block_size, config.num_kv_heads, config.head_dim)

    def __init__(
        self,
        model: Model,
        specs: Sequence[KVCacheSpec],
        kv_dtype: torch.dtype,
        device: torch.device,
        *,
        max_tokens: int,
        max_logits: int,
    ) -> None:
        """``max_tokens`` and ``max_logits``: most tokens, and most rows with logits, of one step."""
        self.device = device
        self._model = model  # its weights are borrowed by the program
        self._specs = specs
        self._layers: list[_native.AttentionLayer] = []
        self._caches: list[torch.Tensor] = []  # per layer uint8 [num_blocks, block_bytes]
        for attention in model.attention_specs:
            spec = specs[attention.group]
            layer = _native.AttentionLayer(
                kv_type=KV_TYPES[kv_dtype],
                block_size=spec.block_size,
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                scale=attention.scale,
                window=attention.window or 0,
                softcap=attention.softcap or 0.0,
                causal=attention.causal,
            )
            self._layers.append(layer)
            if attention.causal or not self._caches:
                own = torch.from_numpy(_native.allocate_bytes(spec.num_blocks, layer.block_bytes))
            self._caches.append(own)
        recorder = Recorder()
        model.forward(recorder)
        self.program = compile_program(
            recorder, self._caches, self._layers, max_tokens=max_tokens, max_logits=max_logits
        )
        self._finds_best = recorder.nodes[-1].op == "logits"
        # Not filled: pages cost nothing until a step writes them.
        self._logits = step_logits(max_logits, model.result_size)
        distinct = list({cache.data_ptr(): cache for cache in self._caches}.values())
        self._warmer = _native.PageWarmer(distinct, WARM_BYTES // len(distinct))

    def forward(self, inputs: StepInputs) -> Computed:
        """One pass. The logits lie in a buffer of the backend."""
        wanted = inputs.logits_rows.shape[0]
        kept = inputs.logits_kept
        found = empty_extremes(wanted)
        self.program.run(
            inputs.token_ids,
            inputs.positions,
            inputs.query_start,
            inputs.context_lens,
            inputs.slot_mapping,
            inputs.block_tables,
            inputs.logits_rows,
            self._logits,
            torch.ones(wanted, dtype=torch.bool) if kept is None else kept,
            *found,
        )
        return Computed(self._logits[:wanted], found if self._finds_best else None)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Layer by layer."""
        for copy in copies:
            for layer in self._specs[copy.group].layers:
                cache: np.ndarray[tuple[int, int], np.dtype[np.uint8]] = self._caches[layer].numpy()
                cache[copy.target] = cache[copy.source]
