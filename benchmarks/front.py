"""What a step costs in the front alone, without a model: frames, text, logprobs, readers; JSON out.

    python benchmarks/front.py [--batch 1,16,64] [--steps 400] [--json out.json]

Each step brings one token for each of ``batch`` requests. ``frame`` is decoding the message, ``take in`` what the front
does with it (text, stop strings, logprobs, metrics), ``readers`` an asyncio reader per request that is woken for every
token (paced readers are woken less often). Microseconds of CPU time per step: the least and the median of all steps.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from pagemill.bench import report
from pagemill.config import DEFAULT_MODEL, EngineConfig
from pagemill.core.messages import EngineOutput
from pagemill.engine.detokenizer import Vocabulary
from pagemill.engine.input import PreparedRequest
from pagemill.engine.metrics import Metrics
from pagemill.engine.output import OutputKind, OutputProcessor, RequestState
from pagemill.engine.text import ModelText
from pagemill.engine.wire import FromEngine, StepOutputs, StepStats
from pagemill.models.sources import resolve_source
from pagemill.params import SamplingParams

TEXT = "Pages are blocks of memory; a request holds as many as its tokens need, and gives them back when it ends. "
CASES: dict[str, tuple[OutputKind, dict[str, Any]]] = {
    "delta": (OutputKind.DELTA, {}),
    "delta, stop string": (OutputKind.DELTA, {"stop": ("never there",)}),
    "final": (OutputKind.FINAL, {}),
    "final, 5 logprobs": (OutputKind.FINAL, {"logprobs": 5}),
}


class Request(msgspec.Struct):
    """As much of an engine's request as the front's state needs."""

    request_id: str


def frames(ids: list[int], batch: int, steps: int, num_logprobs: int | None) -> list[bytes]:
    """One message a step, as the engine sends it."""
    encoder = msgspec.msgpack.Encoder()
    found = []
    for step in range(steps):
        outputs = []
        for row in range(batch):
            token = ids[(step + row) % len(ids)]
            candidates = None
            if num_logprobs is not None:
                candidates = [[(token, -0.5, 1), *((ids[i], -1.0 - i, i + 2) for i in range(num_logprobs))]]
            outputs.append(
                EngineOutput(request_id=f"cmpl-{row:06}-0badcafe", new_token_ids=[token], new_logprobs=candidates)
            )
        stats = StepStats(step, time.monotonic() + step * 0.008, 0.0, batch, batch)
        found.append(encoder.encode(StepOutputs(outputs, stats)))
    return found


async def measure(text: ModelText, batch: int, steps: int, kind: OutputKind, options: dict[str, Any]) -> dict[str, Any]:
    """Costs of one case."""
    loop = asyncio.get_running_loop()
    processor = OutputProcessor(Vocabulary(text.tokenizer), Metrics(model_name="none", max_model_len=8192))
    waiters: dict[int, asyncio.Future[None]] = {}
    states: list[RequestState] = []

    def wake(row: int) -> None:
        if not waiters[row].done():
            waiters[row].set_result(None)

    async def read(row: int) -> None:
        while not states[row].finished:
            waiters[row] = loop.create_future()
            await waiters[row]
            states[row].take()

    for row in range(batch):
        prepared = PreparedRequest(
            request_id=str(row),
            prompt=None,
            prompt_token_ids=[1],
            params=SamplingParams(max_tokens=steps + 1, **options),
            requests=[Request(f"cmpl-{row:06}-0badcafe")],  # type: ignore[list-item]
            stop_by_id={},
        )
        states.append(
            RequestState(
                prepared,
                kind=kind,
                arrival_s=time.monotonic(),
                vocabulary=processor.vocabulary,
                on_change=(lambda row=row: wake(row)) if kind is OutputKind.DELTA else (lambda: None),
            )
        )
        processor.add(states[row])
    readers = [asyncio.create_task(read(row)) for row in range(batch)]
    await asyncio.sleep(0)
    decoder = msgspec.msgpack.Decoder(FromEngine)
    messages = frames(text.tokenizer.encode(TEXT), batch, steps, options.get("logprobs"))
    gc.collect()
    gc.freeze()
    costs: dict[str, list[float]] = {"frame": [], "take in": [], "readers": []}
    for message in messages:
        begin = time.thread_time()
        step = decoder.decode(message)
        decoded = time.thread_time()
        processor.process(step)
        taken = time.thread_time()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        done = time.thread_time()
        for name, cost in zip(costs, (decoded - begin, taken - decoded, done - taken), strict=True):
            costs[name].append(cost * 1e6)
    for reader in readers:
        reader.cancel()
    return {name: {"least_us": min(all_), "median_us": statistics.median(all_)} for name, all_ in costs.items()}


def main() -> None:
    """Measure every case and print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = ModelText.open(resolve_source(DEFAULT_MODEL), EngineConfig())
    results = []
    for batch in map(int, args.batch.split(",")):
        for name, (kind, options) in CASES.items():
            costs = asyncio.run(measure(text, batch, args.steps, kind, options))
            results.append({"batch": batch, "case": name, "costs": costs})
            shown = ", ".join(
                f"{part} {cost['least_us']:.0f} ({cost['median_us']:.0f})" for part, cost in costs.items()
            )
            print(f"batch {batch:3}  {name:20}  {shown}", file=sys.stderr)
    document = report.write(args.json, "front", {"steps": args.steps}, {"cases": results})
    if args.json is None:
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
