"""What the engine core drives: a model on a device, behind four methods.

Owns the start: find the checkpoint, load it, choose kernels, plan memory, allocate the KV cache, warm up, in that
order, each timed. Knows nothing of requests' text or of sockets.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.config import EngineConfig, validate
from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import SchedulerOutput, StepResult
from pagemill.errors import ConfigError, EngineError
from pagemill.memory_plan import MemoryPlan, activation_bytes, kv_specs, plan_memory
from pagemill.model_config import ModelConfig
from pagemill.models.checkpoint import Checkpoint, open_checkpoint
from pagemill.models.decoder import Decoder
from pagemill.models.loader import load_model
from pagemill.models.sources import ModelSource, resolve_source
from pagemill.platform import MemoryInfo, Platform, select_platform
from pagemill.sampling.sampler import Sampler
from pagemill.worker.backend import Backend, ReferenceBackend
from pagemill.worker.input_batch import InputBatch
from pagemill.worker.model_runner import MAX_PROMPT_LOGITS, Forward, ModelRunner

__all__ = ["Executor", "InprocExecutor"]

log = logging.getLogger(__name__)

KV_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Executor(Protocol):
    """Steps of one model, wherever they are computed."""

    kv_specs: tuple[KVCacheSpec, ...]
    model_config: ModelConfig
    max_model_len: int
    memory_plan: MemoryPlan
    source: ModelSource
    asynchronous: bool
    """Whether :meth:`execute` returns before the forward pass is done."""

    def execute(self, plan: SchedulerOutput) -> Any:
        """Start the forward pass; returns a handle for :meth:`sample`."""

    def sample(self, plan: SchedulerOutput, mask: NDArray[np.int32] | None, handle: Any) -> StepResult:
        """Wait for the forward pass and choose tokens. ``mask`` int32 [R, ceil(V / 32)]: allowed tokens by bit."""

    def call(self, name: str, *args: Any) -> Any:
        """Run one of the worker's named functions."""

    def shutdown(self) -> None:
        """Let go of the model and its memory."""


class InprocExecutor:
    """The model in the caller's own process."""

    asynchronous = False

    def __init__(
        self,
        runner: ModelRunner,
        *,
        source: ModelSource,
        model_config: ModelConfig,
        memory_plan: MemoryPlan,
        start_times_s: dict[str, float],
    ) -> None:
        self._runner: ModelRunner | None = runner
        self.source = source
        self.model_config = model_config
        self.memory_plan = memory_plan
        self.kv_specs = memory_plan.specs
        self.max_model_len = memory_plan.max_model_len
        self.start_times_s = start_times_s
        """Seconds that each phase of the start took."""
        self._functions = {"start_times_s": lambda: self.start_times_s, "memory_plan": self.memory_plan.render}

    @classmethod
    def create(cls, config: EngineConfig) -> InprocExecutor:
        """Load ``config.model`` and get ready for the first step. Raises ConfigError and ModelError."""
        validate(config)
        phases = _Phases()
        platform = select_platform(config.device)
        memory = platform.memory()
        with phases("find"):
            source = resolve_source(config.model, revision=config.revision)
            checkpoint = open_checkpoint(source)
        native = _use_native(config, platform)
        with phases("load"):
            torch.set_num_threads(1 if native else config.num_threads or platform.num_threads())
            loading = config if native else _plain_where_it_fits(config, checkpoint, memory)
            decoder = load_model(checkpoint, loading, native=native, device=platform.device)
            checkpoint.close()
        with phases("plan"):
            plan, kv_dtype = _plan(config, decoder, platform, memory)
            log.info("%s", plan.render())
        with phases("allocate"):
            backend: Backend
            if native:
                from pagemill.worker.native import NativeBackend

                backend = NativeBackend(
                    decoder,
                    plan.specs,
                    kv_dtype,
                    max_tokens=config.max_num_batched_tokens,
                    max_logits=config.max_num_seqs + MAX_PROMPT_LOGITS,
                )
            else:
                backend = ReferenceBackend(decoder, plan.specs, kv_dtype, platform.device)
            batch = InputBatch(
                max_rows=config.max_num_seqs,
                max_model_len=plan.max_model_len,
                block_size=config.block_size,
                num_groups=len(plan.specs),
            )
            sampler = Sampler(config.max_num_seqs, decoder.config.vocab_size)
            runner = ModelRunner(backend, batch, sampler)
        with phases("warm up"):
            runner.warm_up()
            platform.synchronize()
        log.info("started in %s", phases)
        return cls(runner, source=source, model_config=decoder.config, memory_plan=plan, start_times_s=phases.seconds)

    def execute(self, plan: SchedulerOutput) -> Forward:
        """Run the forward pass."""
        return self._running.execute(plan)

    def sample(self, plan: SchedulerOutput, mask: NDArray[np.int32] | None, handle: Forward) -> StepResult:
        """Choose tokens."""
        return self._running.sample(plan, mask, handle)

    def call(self, name: str, *args: Any) -> Any:
        """``start_times_s`` or ``memory_plan``."""
        if name not in self._functions:
            raise EngineError(f"the worker has no function {name!r}; it has {', '.join(sorted(self._functions))}")
        return self._functions[name](*args)

    def shutdown(self) -> None:
        """Drop weights and KV cache; further steps raise :class:`EngineError`."""
        self._runner = None

    @property
    def _running(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("the executor was shut down; create another")
        return self._runner


class _Phases:
    """Seconds by phase, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start_s

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        return f"{total:.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())


def _use_native(config: EngineConfig, platform: Platform) -> bool:
    """Whether the native kernels run the steps; the choice and its reason are logged."""
    reason = "--kernels=reference" if config.kernels == "reference" else _why_not_native(config, platform)
    if reason is None:
        log.info("kernels: native")
        return True
    if config.kernels == "native":
        raise ConfigError(f"--kernels=native cannot work: {reason}; use --kernels=auto")
    log.log(
        logging.INFO if config.kernels == "reference" else logging.WARNING,
        "kernels: PyTorch's own functions, much slower than the native ones (%s)",
        reason,
    )
    return False


def _why_not_native(config: EngineConfig, platform: Platform) -> str | None:
    if platform.name != "cpu":
        return f"they run on CPUs, not on {platform.name}"
    try:
        importlib.import_module("pagemill._native")
    except ImportError as error:
        return f"they were not built: {error}"
    if config.kv_cache_dtype == "float16":
        return "their KV cache is bfloat16 or float32, not float16"
    if config.block_size % 16:
        return f"their blocks are multiples of 16 tokens, not {config.block_size}"
    return None


def _plain_where_it_fits(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryInfo) -> EngineConfig:
    """PyTorch cannot multiply with a GGUF file's blocks: keep their numbers, unless that takes half the memory."""
    if config.dtype != "auto" or checkpoint.format != "gguf":
        return config
    plain_bytes = 4 * sum(math.prod(checkpoint.tensor(name).shape) for name in checkpoint.names())
    if plain_bytes > memory.available_bytes // 2:
        log.warning("weights: %.1f GiB as float32 is too much; each step unpacks them anew", plain_bytes / 2**30)
        return config
    log.info("weights: as float32, which PyTorch's functions need")
    return dataclasses.replace(config, dtype="float32")


def _plan(
    config: EngineConfig, decoder: Decoder, platform: Platform, memory: MemoryInfo
) -> tuple[MemoryPlan, torch.dtype]:
    """The memory plan and the type of the KV cache."""
    default = torch.float32 if decoder.dtype == torch.float32 else torch.bfloat16
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, default)
    model = decoder.config
    plan = plan_memory(
        config,
        model,
        memory=memory,
        weight_bytes=decoder.weight_bytes,
        activation_bytes=activation_bytes(model, config.max_num_batched_tokens, decoder.dtype.itemsize),
        specs=kv_specs(model, config.block_size, kv_dtype.itemsize),
        kv_share=platform.kv_share,
        max_positions=decoder.max_positions,
    )
    for note in plan.notes:
        log.warning("%s", note)
    return plan, kv_dtype
