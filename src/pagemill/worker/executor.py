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
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pagemill.config import EngineConfig, isa_override, validate
from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import SchedulerOutput, StepResult
from pagemill.errors import ConfigError, EngineError
from pagemill.memory_plan import MAX_PROMPT_LOGITS, MemoryPlan, activation_bytes, kv_specs, plan_memory
from pagemill.model_config import ModelConfig
from pagemill.models.checkpoint import Checkpoint, open_checkpoint
from pagemill.models.encoder import Model
from pagemill.models.loader import load_model
from pagemill.models.sources import ModelSource, resolve_source
from pagemill.platform import MemoryInfo, Platform, select_platform
from pagemill.sampling.constraints import Constraints
from pagemill.sampling.picker import Picker, TorchPicker
from pagemill.sampling.sampler import Sampler
from pagemill.worker.backend import ReferenceBackend
from pagemill.worker.input_batch import InputBatch
from pagemill.worker.model_runner import ModelRunner
from pagemill.worker.pooling_runner import PoolingRunner

if TYPE_CHECKING:
    from pagemill.worker.native import NativeBackend

__all__ = ["Executor", "InprocExecutor"]

log = logging.getLogger(__name__)

NATIVE_BLOCK_MULTIPLE = 16
PLAIN_TYPES = {"F64", "F32", "F16", "BF16", "I64"}
KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
}


class Executor(Protocol):
    """Steps of one model, wherever they are computed."""

    kv_specs: tuple[KVCacheSpec, ...]
    model_config: ModelConfig
    max_model_len: int
    memory_plan: MemoryPlan
    source: ModelSource
    asynchronous: bool
    """Whether :meth:`execute` returns before the forward pass is done."""
    num_cpus: int
    """That this process may use."""
    num_free_cpus: int
    """Of those, how many a forward pass leaves idle."""

    def execute(self, plan: SchedulerOutput) -> Any:
        """Start the forward pass; returns a handle for :meth:`sample`."""

    def sample(self, plan: SchedulerOutput, constraints: Constraints | None, handle: Any) -> StepResult:
        """Wait for the forward pass and choose tokens, of those that ``constraints`` allow the plan's rows."""

    def call(self, name: str, *args: Any) -> Any:
        """Run one of the worker's named functions."""

    def shutdown(self) -> None:
        """Let go of the model and its memory."""


class Runner(Protocol):
    """What does the steps: :class:`ModelRunner`, or where a model pools :class:`PoolingRunner`."""

    def execute(self, plan: SchedulerOutput) -> Any:
        """Run the forward pass; returns a handle for :meth:`sample`."""

    def sample(self, plan: SchedulerOutput, constraints: Constraints | None, forward: Any) -> StepResult:
        """What the step produced."""

    def warm_up(self) -> None:
        """Let first calls pay nothing."""


class InprocExecutor:
    """The model in the caller's own process."""

    asynchronous = False

    def __init__(
        self,
        runner: Runner,
        *,
        source: ModelSource,
        model_config: ModelConfig,
        memory_plan: MemoryPlan,
        num_cpus: int,
        num_threads: int,
        start_times_s: dict[str, float],
    ) -> None:
        """``num_threads``: that a forward pass keeps busy."""
        self._runner: Runner | None = runner
        self.source = source
        self.model_config = model_config
        self.memory_plan = memory_plan
        self.kv_specs = memory_plan.specs
        self.max_model_len = memory_plan.max_model_len
        self.num_cpus = num_cpus
        self.num_free_cpus = max(0, num_cpus - num_threads)
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
            quantized = _is_quantized(checkpoint)
        native = _use_native(config, platform)
        with phases("load"):
            num_threads = _set_threads(config, platform, native)
            loading = config if native or not quantized else _plain_where_it_fits(config, checkpoint, memory)
            model = load_model(checkpoint, loading, native=native, device=platform.device)
            checkpoint.close()
        with phases("plan"):
            kept = native and config.dtype == "auto" and quantized  # the file's integers
            narrow = model.dtype != torch.float32 or kept
            kv_dtype = _kv_dtype(config, narrow, integers=kept or config.quantization == "int8")
            plan = _plan(config, model, platform, memory, _backend_class(native), kv_dtype)
            log.info("%s", plan.render())
        with phases("allocate"):
            backend = _backend_class(native)(
                model,
                plan.specs,
                kv_dtype,
                platform.device,
                max_tokens=config.max_num_batched_tokens,
                max_logits=_max_results(config, model.config),
            )
            batch = InputBatch(
                max_rows=config.max_num_seqs,
                max_model_len=plan.max_model_len,
                block_size=config.block_size,
                num_groups=len(plan.specs),
            )
            runner: Runner
            if model.config.pooling is not None:
                runner = PoolingRunner(backend, batch, model.config)
            else:
                sampler = Sampler(
                    config.max_num_seqs, model.config.vocab_size, _picker(native), logprobs_mode=config.logprobs_mode
                )
                runner = ModelRunner(backend, batch, sampler)
        with phases("warm up"):
            runner.warm_up()
            platform.synchronize()
        log.info("started in %s", phases)
        return cls(
            runner,
            source=source,
            model_config=model.config,
            memory_plan=plan,
            num_cpus=platform.num_cpus(),
            num_threads=num_threads,
            start_times_s=phases.seconds,
        )

    def execute(self, plan: SchedulerOutput) -> Any:
        """Run the forward pass."""
        return self._running.execute(plan)

    def sample(self, plan: SchedulerOutput, constraints: Constraints | None, handle: Any) -> StepResult:
        """Choose tokens, or hand on vectors."""
        return self._running.sample(plan, constraints, handle)

    def call(self, name: str, *args: Any) -> Any:
        """``start_times_s`` or ``memory_plan``."""
        if name not in self._functions:
            raise EngineError(f"the worker has no function {name!r}; it has {', '.join(sorted(self._functions))}")
        return self._functions[name](*args)

    def shutdown(self) -> None:
        """Drop weights and KV cache; further steps raise :class:`EngineError`."""
        self._runner = None

    @property
    def _running(self) -> Runner:
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


def _backend_class(native: bool) -> type[ReferenceBackend] | type[NativeBackend]:
    if not native:
        return ReferenceBackend
    from pagemill.worker.native import NativeBackend  # imports the compiled library

    return NativeBackend


def _picker(native: bool) -> Picker:
    if not native:
        return TorchPicker()
    from pagemill.sampling.native import NativePicker

    return NativePicker()


def _max_results(config: EngineConfig, model: ModelConfig) -> int:
    """Most rows of one step that have logits, or hidden states that are wanted."""
    if model.pooling is None:
        return config.max_num_seqs + MAX_PROMPT_LOGITS
    return config.max_num_batched_tokens if model.pooling.kind == "mean" else config.max_num_seqs


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
    if config.block_size % NATIVE_BLOCK_MULTIPLE:
        return f"their blocks are multiples of {NATIVE_BLOCK_MULTIPLE} tokens, not --block-size={config.block_size}"
    if config.kv_cache_dtype == "float16":
        return "their KV cache is bfloat16, float32 or int8, not --kv-cache-dtype=float16"
    try:
        importlib.import_module("pagemill._native")
    except ImportError as error:
        return f"they were not built: {error}"
    return None


def _set_threads(config: EngineConfig, platform: Platform, native: bool) -> int:
    """One pool does the work, PyTorch's or the native one; two would fight over the cores. Returns how many it has."""
    threads = config.num_threads or platform.num_threads()
    torch.set_num_threads(1 if native else threads)
    if native:
        library = importlib.import_module("pagemill._native")
        library.set_num_threads(threads)
        if isa := isa_override():
            library.set_isa(isa)
        log.info("%d threads, instruction set %s", threads, library.isa())
    return threads if platform.name == "cpu" else 1


def _is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether matrices are stored as blocks of integers (a GGUF file's)."""
    stored = (checkpoint.tensor(name) for name in checkpoint.names())
    return any(len(tensor.shape) > 1 and tensor.type not in PLAIN_TYPES for tensor in stored)


def _plain_where_it_fits(config: EngineConfig, checkpoint: Checkpoint, memory: MemoryInfo) -> EngineConfig:
    """PyTorch cannot multiply with blocks of integers: keep their numbers, unless that takes half the memory."""
    if config.dtype != "auto" or config.quantization is not None:
        return config
    plain_bytes = 4 * sum(math.prod(checkpoint.tensor(name).shape) for name in checkpoint.names())
    if plain_bytes > memory.available_bytes // 2:
        log.warning("weights: %.1f GiB as float32 is too much; each step unpacks them anew", plain_bytes / 2**30)
        return config
    log.info("weights: as float32, which PyTorch's functions need")
    return dataclasses.replace(config, dtype="float32")


def _kv_dtype(config: EngineConfig, narrow: bool, *, integers: bool) -> torch.dtype:
    """``narrow``: whether what runs through the model is fewer than 32 bits wide; ``integers``: whether weights are.

    Beside integer weights an int8 cache costs 0 to 0.1 % of perplexity (benchmarks/RESULTS.md) and halves what decoding
    reads.
    """
    if config.kv_cache_dtype == "auto" and integers:
        log.info("KV cache: int8, as the weights are integers, too; --kv-cache-dtype bfloat16 keeps more bits")
        return torch.int8
    return KV_DTYPES.get(config.kv_cache_dtype, torch.bfloat16 if narrow else torch.float32)


def _plan(
    config: EngineConfig,
    loaded: Model,
    platform: Platform,
    memory: MemoryInfo,
    backend: type[ReferenceBackend] | type[NativeBackend],
    kv_dtype: torch.dtype,
) -> MemoryPlan:
    """Divide the memory for this model."""
    model = loaded.config
    plan = plan_memory(
        config,
        model,
        memory=memory,
        weight_bytes=loaded.weight_bytes,
        activation_bytes=activation_bytes(model, config.max_num_batched_tokens),
        specs=kv_specs(model, config.block_size, backend.layer_block_bytes(model, config.block_size, kv_dtype)),
        kv_share=platform.kv_share,
        max_positions=loaded.max_positions,
    )
    for note in plan.notes:
        log.warning("%s", note)
    return plan
