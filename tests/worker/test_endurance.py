"""Thousands of steps of everything at once: nothing leaks, nothing grows, every request ends."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pagemill.config import EngineConfig
from pagemill.core.scheduler import Scheduler
from pagemill.worker.executor import InprocExecutor
from tests.models.tiny import VOCAB_SIZE, tiny_llama
from tests.worker.serving import request

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3, "prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": {5: 3.0}, "min_tokens": 4, "stop_token_ids": (9,)},
    {"allowed_token_ids": tuple(range(5, 60)), "presence_penalty": 0.5},
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_over_20000_steps(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(tiny_llama(tmp_path)), device="cpu", num_threads=1, max_num_seqs=16, num_gpu_blocks_override=12
    )
    executor = InprocExecutor.create(config)
    scheduler = Scheduler(
        executor.kv_specs, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=executor.max_model_len
    )
    rng = np.random.default_rng(0)
    process = psutil.Process()
    live: set[str] = set()
    after_warm_up_bytes = 0
    for step in range(20_000):
        while len(live) < 24:
            number = scheduler.stats().prefix_query_tokens_total + step * 100 + len(live)
            name = f"r{step}-{len(live)}"
            prompt = rng.integers(5, VOCAB_SIZE, int(rng.integers(1, 70))).tolist()
            kind = KINDS[number % len(KINDS)]
            scheduler.add(request(name, prompt, seed=step, max_tokens=int(rng.integers(4, 30)), eos=(2,), **kind))
            live.add(name)
        if rng.random() < 0.02:
            name = str(rng.choice(sorted(live)))
            assert scheduler.abort(name)
            live.discard(name)
        plan = scheduler.schedule(float(step))
        assert plan is not None
        result = executor.sample(plan, None, executor.execute(plan))
        for output in scheduler.update(plan, result, float(step)):
            assert output.error is None
            if output.finish_reason is not None:
                live.discard(output.request_id)
        if step % 1000 == 0:
            scheduler.check_invariants()
        if step == 2000:
            after_warm_up_bytes = process.memory_info().rss
    assert scheduler.stats().num_preemptions_total > 20
    assert process.memory_info().rss - after_warm_up_bytes < 4 << 20
