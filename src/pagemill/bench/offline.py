"""Drives the engine in this process: throughput of a workload, latency of one stream.

The same work as over HTTP (workloads.py), without the server: the difference between the two is what serving costs.
"""

from __future__ import annotations

import time
from typing import Any

from pagemill.bench.workloads import REPETITIONS, Workload, build
from pagemill.config import EngineConfig
from pagemill.engine.offline import LLM
from pagemill.params import SamplingParams

__all__ = ["latency", "open_engine", "throughput", "warm_up"]


def open_engine(config: EngineConfig) -> LLM:
    """The offline engine of ``config``, warmed up."""
    llm = LLM.from_config(config)
    warm_up(llm)
    return llm


def warm_up(llm: LLM) -> None:
    """Run a few short requests of the text that no measurement uses."""
    items = build("w1", llm.tokenizer.encode, REPETITIONS - 1).items[:4]
    llm.generate([item.prompt for item in items], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)


def throughput(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Output tokens per second of all requests given at once."""
    params = [SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True) for item in workload.items]
    before = llm.stats()
    start = time.perf_counter()
    outputs = llm.generate([item.prompt for item in workload.items], params, use_tqdm=False)
    wall_s = time.perf_counter() - start
    after = llm.stats()
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert produced == sum(item.output_tokens for item in workload.items)
    return {
        "wall_s": wall_s,
        "output_tokens": produced,
        "output_tokens_per_s": produced / wall_s,
        "steps": after.num_steps - before.num_steps,
        "kv_slot_utilization": _ratio(
            after.filled_slot_steps - before.filled_slot_steps, after.allocated_slot_steps - before.allocated_slot_steps
        ),
        "preemptions": after.num_preemptions - before.num_preemptions,
    }


def latency(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Time to first token and decode speed of a single request."""
    (item,) = workload.items
    times = llm.token_times(item.prompt, SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True))
    return {
        "ttft_ms": times[0] * 1e3,
        "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0]),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
