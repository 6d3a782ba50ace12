"""What a step costs in the scheduler alone, without a model; JSON out.

    python benchmarks/scheduler.py [--batch 1,16,64,256] [--steps 2000] [--json out.json]

Steady decoding: all requests run, each step computes one token for each. ``schedule``, ``update`` and ``stats`` are
what the engine calls once a step. The least and the median of all steps are given: the least is what the code costs,
the median what the machine made of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

from pagemill.bench import report
from pagemill.core.kv_cache import KVCacheSpec
from pagemill.core.messages import EngineRequest, SchedulerOutput, StepResult
from pagemill.core.scheduler import Scheduler
from pagemill.params import SamplingParams

BLOCK_SIZE = 16


def filled_scheduler(batch: int, steps: int) -> Scheduler:
    """``batch`` requests with prompts of 32 to 256 tokens, all of them computed."""
    per_request = (256 + steps) // BLOCK_SIZE + 2
    spec = KVCacheSpec(
        kind="full", layers=(0,), block_size=BLOCK_SIZE, bytes_per_block=1, num_blocks=2 * batch * per_request
    )
    scheduler = Scheduler(
        [spec], max_num_seqs=batch, max_num_batched_tokens=max(2048, batch), max_model_len=per_request * BLOCK_SIZE
    )
    rng = random.Random(0)
    for i in range(batch):
        prompt = [rng.randrange(49_152) for _ in range(rng.randint(32, 256))]
        params = SamplingParams(max_tokens=steps * 2)
        scheduler.add(
            EngineRequest(
                request_id=f"cmpl-{i:032x}",
                prompt_token_ids=prompt,
                params=params,
                max_tokens=steps * 2,
                arrival_time_s=0.0,
                eos_token_ids=(2,),
            )
        )
    while any(r.num_computed_tokens < r.num_prompt_tokens for r in (*scheduler.waiting, *scheduler.running)):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(plan, sample(scheduler, plan), 0.0)
    return scheduler


def sample(scheduler: Scheduler, plan: SchedulerOutput) -> StepResult:
    """A token for each row that is due."""
    rows = {request.request_id: request for request in scheduler.running}
    due = [
        rows[name].num_computed_tokens + count == len(rows[name].token_ids)
        for name, count in zip(plan.request_ids, plan.num_new_tokens, strict=True)
    ]
    return StepResult(token_ids=[[7] if is_due else [] for is_due in due])


def measure(batch: int, steps: int) -> dict[str, float]:
    """Microseconds a step."""
    scheduler = filled_scheduler(batch, steps)
    times: dict[str, list[float]] = {"schedule": [], "update": [], "stats": []}
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        result = StepResult(token_ids=[[7] for _ in range(batch)])
        sampled = time.perf_counter()
        scheduler.update(plan, result, 0.0)
        updated = time.perf_counter()
        scheduler.stats()
        times["schedule"].append(planned - start)
        times["update"].append(updated - sampled)
        times["stats"].append(time.perf_counter() - updated)
    found = {"batch": float(batch)}
    for name, values in times.items():
        found[f"{name}_least_us"] = min(values) * 1e6
        found[f"{name}_median_us"] = statistics.median(values) * 1e6
    return found


def main() -> int:
    """Measure each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(int(batch), args.steps) for batch in args.batch.split(",")]
    print("\t".join(rows[0]))
    for row in rows:
        print("\t".join(f"{value:.1f}" for value in row.values()))
    report.write(args.json, "scheduler", {"steps": args.steps}, {"batches": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
