"""Thousands of steps of everything at once: nothing leaks, nothing grows, every request ends."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineRequest
from pagemill.engine.core import EngineCore
from pagemill.engine.wire import Abort, Add, CallReply, StepOutputs, ToEngine
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


STEPS, STEADY_FROM = 20_000, 4_000


class Crowd:
    """24 requests of every kind at once; one in fifty steps somebody leaves."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.count = 0
        self.random = np.random.default_rng(0)

    def take(self) -> list[ToEngine]:
        """What the core finds in its inbox."""
        messages: list[ToEngine] = []
        if self.live and self.random.random() < 0.02:
            gone = str(self.random.choice(sorted(self.live)))
            self.live.discard(gone)
            messages.append(Abort([gone]))
        new = [self.one() for _ in range(24 - len(self.live))]
        self.live |= {one.request_id for one in new}
        return [*messages, Add(new)]

    def one(self) -> EngineRequest:
        self.count += 1
        prompt = self.random.integers(5, VOCAB_SIZE, int(self.random.integers(1, 70))).tolist()
        longest = int(self.random.integers(4, 30))
        kind = KINDS[self.count % len(KINDS)]
        return request(f"r{self.count}", prompt, seed=self.count, max_tokens=longest, eos=(2,), **kind)

    def receive(self, message: StepOutputs | CallReply) -> None:
        """What the core sends."""
        assert isinstance(message, StepOutputs)
        for output in message.outputs:
            assert output.error is None
            if output.finish_reason is not None:
                self.live.discard(output.request_id)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_over_20000_steps(tmp_path: Path) -> None:
    """The engine's whole loop on the native kernels: what the process holds at the end is what it held before."""
    config = EngineConfig(
        model=str(tiny_llama(tmp_path)),
        device="cpu",
        kernels="native",
        num_threads=2,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=12,
    )
    crowd = Crowd()
    core = EngineCore.create(config, InprocExecutor.create(config), inbox=crowd.take, sink=crowd.receive)
    process = psutil.Process()
    held: list[int] = []
    for step in range(STEPS):
        assert core.step()
        if step % 1000 == 0:
            core.scheduler.check_invariants()
        if step >= STEADY_FROM and step % 100 == 0:
            held.append(process.memory_info().rss)
    assert core.scheduler.stats().num_preemptions_total > 20
    assert crowd.count > 3_000
    quarter = len(held) // 4
    assert max(held[-quarter:]) - max(held[:quarter]) < 256 << 10
