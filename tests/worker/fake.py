"""A backend whose logits are a known function of the context that it reads back from its own paged memory.

A wrong slot, block table, position or copy changes what is read, and so the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagemill.core.messages import BlockCopy, NewRow, SchedulerOutput
from pagemill.kernels.ops import StepInputs
from pagemill.params import SamplingParams
from pagemill.sampling.picker import TorchPicker
from pagemill.sampling.sampler import Sampler
from pagemill.worker.backend import Computed
from pagemill.worker.input_batch import InputBatch
from pagemill.worker.model_runner import ModelRunner
from tests.sampling.masks import Masked

VOCAB = 97


def next_token(context: Sequence[int]) -> int:
    """What the fake model says after a context."""
    value = 7
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Greedy output."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeBackend:
    """KV memory holds the token ids themselves, one array a group."""

    name = "fake"
    device = torch.device("cpu")

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.memory = np.full((num_groups, num_blocks * block_size), -1, np.int64)
        self.poisoned: set[int] = set()
        """Contexts that end in these tokens give NaN."""
        self.batches: list[list[int]] = []
        """Tokens of each row, per forward pass."""

    def forward(self, inputs: StepInputs) -> Computed:
        """Tells the extremes, and leaves rubbish where nothing else is wanted."""
        starts, lengths = inputs.query_start.tolist(), inputs.context_lens.tolist()
        self.batches.append(np.diff(starts).tolist())
        for group, slots in enumerate(inputs.slot_mapping):
            self.memory[group, slots.numpy()] = inputs.token_ids.numpy()
        logits = torch.zeros(len(inputs.logits_rows), VOCAB)
        for out, token in enumerate(inputs.logits_rows.tolist()):
            row = int(np.searchsorted(starts, token, side="right")) - 1
            length = int(inputs.positions[token]) + 1
            assert length <= lengths[row]
            assert length - (token - starts[row]) - 1 == lengths[row] - (starts[row + 1] - starts[row])
            for group, table in enumerate(inputs.block_tables):
                places = np.arange(length)
                slots = table[row].numpy()[places // self.block_size] * self.block_size + places % self.block_size
                context = self.memory[group, slots].tolist()
                logits[out, next_token(context)] += 4.0
            if context[-1] in self.poisoned:
                logits[out, 3] = torch.nan
        extremes = TorchPicker().best(logits)
        if inputs.logits_kept is not None:
            logits[~inputs.logits_kept] = torch.arange(VOCAB) * 1e30
        return Computed(logits, extremes)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        size = self.block_size
        for copy in copies:
            memory = self.memory[copy.group]
            memory[copy.target * size : (copy.target + 1) * size] = memory[
                copy.source * size : (copy.source + 1) * size
            ]


class Driver:
    """Plays the core's part by hand: hands out blocks in a shuffled order and keeps each request's progress."""

    def __init__(self, *, block_size: int = 4, num_blocks: int = 64, num_groups: int = 1, seed: int = 0) -> None:
        self.backend = FakeBackend(num_blocks, block_size, num_groups)
        batch = InputBatch(max_rows=8, max_model_len=64, block_size=block_size, num_groups=num_groups)
        self.runner = ModelRunner(self.backend, batch, Sampler(8, VOCAB))
        self.block_size, self.num_groups = block_size, num_groups
        order = np.random.default_rng(seed).permutation(num_blocks)
        self.free = [order.tolist() for _ in range(num_groups)]
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.new: list[str] = []
        self.dropped: list[str] = []
        self.preempted: list[str] = []

    def add(self, name: str, prompt: Sequence[int], **params: Any) -> None:
        self.tokens[name], self.prompts[name] = list(prompt), len(prompt)
        self.params[name] = SamplingParams.create(**{"temperature": 0, **params})
        self._start(name)

    def _start(self, name: str) -> None:
        self.computed[name], self.blocks[name] = 0, [[] for _ in range(self.num_groups)]
        self.new.append(name)

    def finish(self, name: str) -> None:
        self.dropped.append(name)
        self._release(name)
        del self.tokens[name]

    def preempt(self, name: str) -> None:
        self.preempted.append(name)
        self._release(name)
        self._start(name)

    def _release(self, name: str) -> None:
        for group, ids in enumerate(self.blocks.pop(name)):
            self.free[group] += ids

    def plan(self, counts: dict[str, int], copies: list[BlockCopy] | None = None) -> SchedulerOutput:
        added: list[list[list[int]] | None] = []
        rows = []
        for name, count in counts.items():
            have = len(self.blocks[name][0])
            need = -(-(self.computed[name] + count) // self.block_size) - have
            fresh = [[free.pop() for _ in range(need)] for free in self.free]
            for ids, more in zip(self.blocks[name], fresh, strict=True):
                ids += more
            if name in self.new:
                rows.append(
                    NewRow(
                        request_id=name,
                        token_ids=list(self.tokens[name]),
                        num_prompt_tokens=self.prompts[name],
                        params=self.params[name],
                        seed=0,
                        block_ids=[list(ids) for ids in self.blocks[name]],
                        num_computed_tokens=self.computed[name],
                    )
                )
                self.new.remove(name)
                added.append(None)
            else:
                added.append(fresh if need else None)
        plan = SchedulerOutput(
            step=0,
            request_ids=list(counts),
            num_new_tokens=list(counts.values()),
            new_block_ids=added,
            new_rows=rows,
            finished_request_ids=self.dropped,
            preempted_request_ids=self.preempted,
            block_copies=copies or [],
            total_num_tokens=sum(counts.values()),
        )
        self.dropped, self.preempted = [], []
        return plan

    def step(self, counts: dict[str, int], mask: Any = None, copies: list[BlockCopy] | None = None) -> Any:
        plan = self.plan(counts, copies)
        result = self.runner.sample(plan, None if mask is None else Masked(mask), self.runner.execute(plan))
        for i, (name, count) in enumerate(counts.items()):
            self.computed[name] += count
            self.tokens[name] += result.token_ids[i]
        return result

    def output(self, name: str) -> list[int]:
        return self.tokens[name][self.prompts[name] :]

    def remaining(self, name: str) -> int:
        return len(self.tokens[name]) - self.computed[name]
