"""What a step costs in the worker around the forward pass: rows, inputs, sampling, result; JSON out.

    python benchmarks/worker.py [--batch 1,8,64] [--vocab 49152] [--steps 500] [--json out.json]

Steady decoding over a backend that computes nothing. ``execute`` brings the rows up to date and builds the step's
tensors; ``sample`` chooses tokens, greedily, drawn (temperature 0.8, top_p 0.95) or with 5 log probabilities each. The
logits fall off as a language model's do. Least and median of all steps, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pagemill.bench import report
from pagemill.core.messages import BlockCopy, NewRow, SchedulerOutput
from pagemill.kernels.ops import StepInputs
from pagemill.params import SamplingParams
from pagemill.sampling.picker import Extremes, Picker, TorchPicker
from pagemill.sampling.sampler import Sampler
from pagemill.worker.backend import Computed
from pagemill.worker.input_batch import InputBatch
from pagemill.worker.model_runner import ModelRunner

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
PROMPT = 64


class Nothing:
    """A backend whose logits were there before."""

    name = "nothing"
    device = torch.device("cpu")

    def __init__(self, rows: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
        self.logits = -1.5 * torch.log1p(ranks.float())
        self.extremes = TorchPicker().best(self.logits)

    def forward(self, inputs: StepInputs) -> Computed:
        """The same every time; penalties, which change logits, are not measured here."""
        count = len(inputs.logits_rows)
        return Computed(self.logits[:count], Extremes(*(column.copy() for column in self.extremes.first(count))))

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """No memory, no blocks."""


def picker(kind: str) -> Picker:
    """By its name."""
    if kind == "torch":
        return TorchPicker()
    from pagemill.sampling.native import NativePicker

    return NativePicker()


def measure(batch: int, vocab: int, steps: int, kind: str, pick: str) -> dict[str, Any]:
    """Microseconds a step."""
    length = PROMPT + steps + 1
    rows = InputBatch(max_rows=batch, max_model_len=length, block_size=16, num_groups=1)
    runner = ModelRunner(Nothing(batch, vocab), rows, Sampler(batch, vocab, picker(pick)))
    names = [f"cmpl-{i:032x}" for i in range(batch)]
    new = [
        NewRow(
            request_id=name,
            token_ids=list(range(PROMPT)),
            num_prompt_tokens=PROMPT,
            params=SamplingParams.create(max_tokens=steps + 1, **KINDS[kind]),
            seed=i,
            block_ids=[list(range(-(-length // 16)))],
            num_computed_tokens=PROMPT - 1,
        )
        for i, name in enumerate(names)
    ]
    times: dict[str, list[float]] = {"execute": [], "sample": []}
    for step in range(steps):
        plan = SchedulerOutput(
            step=step,
            request_ids=list(names),
            num_new_tokens=[1] * batch,
            new_block_ids=[None] * batch,
            new_rows=new if step == 0 else [],
        )
        start = time.perf_counter()
        forward = runner.execute(plan)
        executed = time.perf_counter()
        runner.sample(plan, None, forward)
        times["execute"].append(executed - start)
        times["sample"].append(time.perf_counter() - executed)
    found: dict[str, Any] = {"batch": batch, "kind": kind, "picker": pick}
    for name, values in times.items():
        found[f"{name}_least_us"] = min(values) * 1e6
        found[f"{name}_median_us"] = statistics.median(values) * 1e6
    return found


def main() -> None:
    """Every batch, kind and picker that is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picker", default="native", choices=("native", "torch"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for batch in (int(part) for part in args.batch.split(",")):
        for kind in KINDS:
            result = measure(batch, args.vocab, args.steps, kind, args.picker)
            results.append(result)
            figures = "  ".join(f"{name} {value:.0f}" for name, value in result.items() if name.endswith("_us"))
            print(f"batch {batch:3d}  {kind:9s} {figures}", file=sys.stderr)
    settings = {"vocab": args.vocab, "steps": args.steps, "picker": args.picker}
    document = report.write(args.json, "worker", settings, {"cases": results})
    if args.json is None:
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
