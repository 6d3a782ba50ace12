"""Three curves: throughput against batch size, latency against load, and the kernels' roofline; JSON and one SVG each.

    python benchmarks/curves.py --options "--quantization int8" --out benchmarks/results/curves

- batch: 1 to 64 requests at once, 64 tokens in and 64 out, in process;
- load: W4 over HTTP at rising rates, up to the highest with TTFT p99 below 500 ms and ITL p99 below 150 ms;
- roofline: the products of a layer at 1 to 256 rows, operations a second against operations a byte of weights, under
  the dot-product and memory ceilings measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

import kernels

matplotlib.use("svg")
from matplotlib import pyplot as plt
from peers import engines

from pagemill import LLM, SamplingParams, _native
from pagemill.bench import client, report, workloads
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import load_tokenizer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
RATES = (2, 4, 6, 8, 10, 12, 14, 16, 20)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPE = "SmolLM2-135M down"
TTFT_MS, ITL_MS = 500.0, 150.0


def batch_curve(options: dict[str, str]) -> list[dict[str, float]]:
    """Output tokens a second for each batch size; the better of two runs."""
    llm = LLM(enable_prefix_caching=False, **options)  # type: ignore[arg-type]  # the fields that are text
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    points = []
    for batch in (BATCHES[-1], *BATCHES):  # the first warms up
        prompts = [
            {"prompt_token_ids": [(7919 * (i + 1) + 31 * j) % 40000 + 100 for j in range(64)]} for i in range(batch)
        ]
        best = 1e9
        for _ in range(2):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
        points.append({"batch": batch, "output_tokens_per_s": batch * 64 / best})
    return points[1:]


def load_curve(options: str, rates: tuple[int, ...]) -> list[dict[str, Any]]:
    """W4's latencies for each rate, up to the first that misses the bounds by a factor of two."""
    tokenizer = load_tokenizer(resolve_source("smollm2-135m-instruct"))
    port = engines.free_port()
    peer = engines.pagemill(port, *options.split())
    url = f"http://127.0.0.1:{port}"
    points = []
    with engines.running(peer, port):
        for i, rate in enumerate((8, *rates)):  # the first warms up
            workload = workloads.build(
                "w4", lambda text: tokenizer.encode(text, add_special_tokens=False), i % 9, rate=float(rate)
            )
            result = client.summarize(*asyncio.run(client.run(url, peer.model, workload)))
            points.append({"rate": rate, **{key: value for key, value in result.items() if "ms" in key}})
            if i and (result["ttft_p99_ms"] > 2 * TTFT_MS or result["itl_p99_ms"] > 2 * ITL_MS):
                break
    return points[1:]


def roofline(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Operations a second of one product at every number of rows, and the ceilings."""
    ceilings = {kind: _native.measure_ceiling(kind, 0.5) for kind in ("int8", "bf16", "f32")}
    ceilings["read_memory"] = _native.measure_ceiling("read", 1.0, 1 << 28)
    points = {kind: [kernels.measure(kind, SHAPE, rows, 0.1, False, ceilings) for rows in ROWS] for kind in kinds}
    return {"ceilings": ceilings, "points": points}


def draw(document: dict[str, Any], out: Path) -> None:
    """One SVG for each curve."""
    results = document["results"]
    figure, axes = plt.subplots(figsize=(5, 3.2))
    axes.plot([p["batch"] for p in results["batch"]], [p["output_tokens_per_s"] for p in results["batch"]], marker="o")
    axes.set(xlabel="requests at once", ylabel="output tokens/s", xscale="log", xticks=BATCHES, xticklabels=BATCHES)
    save(figure, out, "batch")

    figure, axes = plt.subplots(figsize=(5, 3.2))
    for key, label in (("ttft_p50_ms", "TTFT p50"), ("ttft_p99_ms", "TTFT p99"), ("itl_p99_ms", "ITL p99")):
        axes.plot([p["rate"] for p in results["load"]], [p[key] for p in results["load"]], marker="o", label=label)
    axes.set(xlabel="requests a second", ylabel="ms", yscale="log")
    axes.legend()
    save(figure, out, "load")

    figure, axes = plt.subplots(figsize=(5, 3.2))
    ceilings = results["roofline"]["ceilings"]
    for kind, points in results["roofline"]["points"].items():
        axes.plot(
            [p["gops"] / p["gbps"] for p in points], [p["gops"] for p in points], marker="o", label=kind, linewidth=1
        )
        dot = ceilings["bf16" if kind == "bf16" else "int8"] / 1e9
        xs = [0.5, dot / (ceilings["read_memory"] / 1e9), 1000]
        axes.plot(xs, [min(dot, x * ceilings["read_memory"] / 1e9) for x in xs], color="grey", linewidth=0.8)
    axes.set(xlabel="operations a byte of weights", ylabel="GOP/s", xscale="log", yscale="log")
    axes.legend()
    save(figure, out, "roofline")


def save(figure: Any, out: Path, name: str) -> None:
    """As OUT-NAME.svg."""
    figure.tight_layout()
    figure.savefig(out.with_name(f"{out.name}-{name}.svg"))
    plt.close(figure)


def main() -> int:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", default="--quantization int8", help="of pagemill serve")
    parser.add_argument("--kinds", default="int8,group4_min,bf16", help="of weights, for the roofline")
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/curves"))
    args = parser.parse_args()
    words = args.options.split()
    options = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    results = {
        "roofline": roofline(tuple(args.kinds.split(","))),
        "load": load_curve(args.options, tuple(map(int, args.rates.split(",")))),
        "batch": batch_curve(options),
    }
    document = report.write(args.out.with_name(f"{args.out.name}.json"), "curves", {"options": args.options}, results)
    draw(document, args.out)
    kept = [p["rate"] for p in results["load"] if p["ttft_p99_ms"] < TTFT_MS and p["itl_p99_ms"] < ITL_MS]
    print(f"highest rate with TTFT p99 < {TTFT_MS:g} ms and ITL p99 < {ITL_MS:g} ms: {max(kept, default=0)}/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
