"""Where one step of a model goes, instruction by instruction; a table and JSON out.

    python benchmarks/steps.py [--quantization int8 | --dtype bfloat16] [--rows 16,32,64] [--contexts 100,280]
        [--prompts 128,512] [--json out.json]

The recorded step of the native kernels alone, without a scheduler, sampling or a server: ``rows`` requests decode their
token at ``contexts`` tokens, or one request computes a prompt of ``prompts``. Blocks lie anywhere in the cache, as in a
server that has run for a while, and every step takes other requests' blocks. Microseconds a token: the median step, and
the mean of each kind of instruction on one core, with what it waits for the other after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from pagemill import _native
from pagemill.bench import report
from pagemill.config import DEFAULT_MODEL, EngineConfig
from pagemill.kernels.ops import StepInputs
from pagemill.memory_plan import kv_specs
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from pagemill.worker.native import KV_TYPES, NativeBackend

BLOCK_SIZE = 16
KV_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KV_TYPES}
KV_BYTES = 400_000_000
"""Of the cache: several times what a step reads, so that no step finds the last one's keys."""
FILLED = 64
"""Blocks that are filled at once."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A model's recorded step over a cache whose blocks all hold keys and values of something."""

    backend: NativeBackend
    vocab_size: int
    groups: int
    num_blocks: int  # of each group

    @classmethod
    def create(cls, config: EngineConfig, kv_dtype: torch.dtype, max_rows: int, max_tokens: int) -> Recorded:
        """The model of ``config``."""
        checkpoint = open_checkpoint(resolve_source(config.model))
        model = load_model(checkpoint, config, native=True, device=torch.device("cpu"))
        checkpoint.close()
        block_bytes = NativeBackend.layer_block_bytes(model.config, BLOCK_SIZE, kv_dtype)
        specs = kv_specs(model.config, BLOCK_SIZE, block_bytes)
        blocks = KV_BYTES // sum(spec.bytes_per_block for spec in specs)
        backend = NativeBackend(
            model,
            [msgspec.structs.replace(spec, num_blocks=blocks) for spec in specs],
            kv_dtype,
            torch.device("cpu"),
            max_tokens=max(max_tokens, FILLED * BLOCK_SIZE),
            max_logits=max(max_rows, FILLED),
        )
        made = cls(backend, model.result_size, len(specs), blocks)
        for block in range(0, blocks, FILLED):  # pages that were never written are one page of zeros to the kernels
            some = torch.arange(block, min(block + FILLED, blocks), dtype=torch.int32)[:, None]
            backend.forward(made.inputs([some] * made.groups, BLOCK_SIZE, BLOCK_SIZE))
        return made

    def inputs(self, tables: list[torch.Tensor], new: int, context: int) -> StepInputs:
        """Each row of the tables a request whose ``new`` tokens bring it to ``context``."""
        rows = len(tables[0])
        positions = torch.arange(context - new, context, dtype=torch.int32)
        slots = [(t[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten() for t in tables]
        return StepInputs(
            token_ids=torch.randint(self.vocab_size, (rows * new,), dtype=torch.int32),
            positions=positions.repeat(rows),
            query_start=torch.arange(0, rows * new + 1, new, dtype=torch.int32),
            context_lens=torch.full((rows,), context, dtype=torch.int32),
            slot_mapping=slots,
            block_tables=tables,
            logits_rows=torch.arange(new - 1, rows * new, new, dtype=torch.int32),
            logits_kept=torch.zeros(rows, dtype=torch.bool),
        )

    def draw(self, rows: int, new: int, context: int) -> StepInputs:
        """Requests whose blocks lie anywhere."""
        each = -(-context // BLOCK_SIZE)
        if rows * each > self.num_blocks:
            raise SystemExit(f"{rows} x {context} tokens need {rows * each} blocks; there are {self.num_blocks}")
        shuffled = [torch.randperm(self.num_blocks, dtype=torch.int32) for _ in range(self.groups)]
        return self.inputs([blocks[: rows * each].view(rows, each) for blocks in shuffled], new, context)


def measure(backend: NativeBackend, made: list[StepInputs], seconds: float) -> dict[str, Any]:
    """Steps over ``made`` in turn."""
    for step in made:
        backend.forward(step)
    backend.program.set_profiling(True)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        backend.forward(made[len(times) % len(made)])
        times.append(time.perf_counter() - start)
    tokens = len(made[0].token_ids)
    parts: dict[str, float] = {}
    before = ""
    for name, spent in backend.program.timings():
        named = (
            {"attention": "linear o", "gated": "linear down"}.get(before, "linear qkv") if name == "linear" else name
        )
        parts[named] = parts.get(named, 0.0) + spent / len(times) / tokens * 1e6
        before = before if name == "rows" else name
    return {"us_per_token": statistics.median(times) / tokens * 1e6, "steps": len(times), "instructions_us": parts}


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv", choices=KV_DTYPES, help="default: bfloat16 with --dtype, else int8")
    parser.add_argument("--rows", default="1,16,32,64")
    parser.add_argument("--contexts", default="100,280")
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, contexts, prompts = (
        [int(part) for part in text.split(",") if part] for text in (args.rows, args.contexts, args.prompts)
    )
    config = EngineConfig(model=args.model, dtype=args.dtype, quantization=args.quantization)
    kv = args.kv or ("int8" if args.dtype == "auto" else "bfloat16")
    recorded = Recorded.create(config, KV_DTYPES[kv], max(rows, default=1), max([*rows, *prompts]))
    cases = [(n, 1, context) for context in contexts for n in rows] + [(1, prompt, prompt) for prompt in prompts]
    results = []
    for count, new, context in cases:
        made = [recorded.draw(count, new, context) for _ in range(8)]
        found = {"rows": count, "new_tokens": new, "context": context, **measure(recorded.backend, made, args.seconds)}
        results.append(found)
        parts = "  ".join(f"{name} {spent:.1f}" for name, spent in found["instructions_us"].items())
        print(f"{count:3} x {new:4} at {context:5}: {found['us_per_token']:7.1f} us a token  {parts}", file=sys.stderr)
    settings = {
        "model": args.model, "dtype": args.dtype, "quantization": args.quantization, "kv": kv,
        "isa": _native.isa(), "threads": _native.num_threads(),
    }  # fmt: skip
    report.write(args.json, "steps", settings, {"steps": results})


if __name__ == "__main__":
    main()
