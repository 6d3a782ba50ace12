#!/usr/bin/env python
"""What structured output costs a full batch: requests with a schema each, all different, against the same ones free.

    python benchmarks/structured.py [--batch 32] [--tokens 96] [--repetitions 3] [--quantization int8]
        [--num-threads N] [--json out.json]

Every schema asks for more than ``--tokens``, so both kinds produce the same number of tokens in batches of the same
size. The first constrained run builds the grammars; its time is told apart, beside the repetitions' medians, which find
them in the cache. Free and constrained runs take turns. With fewer ``--num-threads`` than CPUs the masks are computed
under the forward pass. ``fall_percent`` is what constrained output loses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from pagemill import LLM, SamplingParams
from pagemill.bench import report

TYPES: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 40},
    {"type": "integer", "minimum": 0, "maximum": 100_000},
    {"type": "number"},
    {"enum": ["north", "south", "east", "west"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
)
WORDS = ("name", "age", "city", "price", "kind", "colour", "date", "note", "size", "count", "place", "state")


def schema(number: int) -> dict[str, Any]:
    """Of a list of many objects, with properties of their own for each number."""
    size = 3 + number % 4
    names = [f"{WORDS[(number * 5 + at) % len(WORDS)]}_{number}" for at in range(size)]
    properties = {name: TYPES[(number + at * 3) % len(TYPES)] for at, name in enumerate(names)}
    item = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 1000}


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> float:
    """Output tokens per second."""
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - start_s
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert produced == sum(each.max_tokens or 0 for each in params), "an output ended early"
    return produced / wall_s


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    llm = LLM(
        quantization=arguments.quantization,
        num_threads=arguments.num_threads,
        max_num_seqs=arguments.batch,
        max_model_len=2048,
    )
    prompts = [f"List things about topic {number} as JSON:\n" for number in range(arguments.batch)]
    base = {"temperature": 0, "max_tokens": arguments.tokens}
    free = [SamplingParams(**base, ignore_eos=True) for _ in prompts]
    bound = [
        SamplingParams.create(**base, structured_outputs={"json": json.dumps(schema(number))})
        for number in range(arguments.batch)
    ]
    run(llm, prompts, free)
    first = run(llm, prompts, bound)
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    for _ in range(arguments.repetitions):
        rates["free"].append(run(llm, prompts, free))
        rates["constrained"].append(run(llm, prompts, bound))
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    return {
        "free_tokens_per_s": medians["free"],
        "constrained_tokens_per_s": medians["constrained"],
        "first_constrained_tokens_per_s": first,
        "fall_percent": 100 * (1 - medians["constrained"] / medians["free"]),
        "runs": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    settings = {name: getattr(arguments, name) for name in ("batch", "tokens", "quantization", "num_threads")}
    report.write(arguments.json, "structured", settings, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
