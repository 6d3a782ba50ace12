"""W1 to W5 against Pagemill (and, with --peers, other engines on the same work), interleaved; JSON and a table.

    python benchmarks/run.py --out benchmarks/results/today.json
    python benchmarks/run.py --peers llama.cpp,vllm --work w1,w2

One repetition of every engine, then the next: a machine whose speed drifts then moves all of them alike. Each engine
runs alone. W5 is the time from the launch of the server to its first good completion, with the model cached.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from peers import engines

from pagemill.bench import client, report, workloads
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import load_tokenizer

COLUMNS = {
    "w1 tok/s": ("w1", "output_tokens_per_s"),
    "w2 TTFT ms": ("w2", "ttft_p50_ms"),
    "w2 tok/s": ("w2", "decode_tokens_per_s"),
    "w3 tok/s": ("w3", "output_tokens_per_s"),
    "w4:4 TTFT p50": ("w4:4", "ttft_p50_ms"),
    "w4:4 TTFT p99": ("w4:4", "ttft_p99_ms"),
    "w4:4 ITL p99": ("w4:4", "itl_p99_ms"),
    "w4:8 TTFT p50": ("w4:8", "ttft_p50_ms"),
    "w4:8 TTFT p99": ("w4:8", "ttft_p99_ms"),
    "w4:8 ITL p99": ("w4:8", "itl_p99_ms"),
    "w5 s": ("w5", "seconds"),
    "peak MB": ("w5", "peak_rss_mb"),
}


def peers_for(names: list[str], options: list[str]) -> list[Callable[[int], engines.Peer]]:
    """A constructor, given a port, for each engine to run; Pagemill first, once per set of options."""
    found: list[Callable[[int], engines.Peer]] = [
        lambda port, extra=extra: engines.pagemill(port, *extra.split()) for extra in options
    ]
    source = resolve_source("smollm2-135m-instruct")
    if "llama.cpp" in names:
        binaries = engines.install_llama_cpp()
        for kind in ("Q4_0", "Q8_0", "BF16"):
            file = engines.requantized(binaries, source.path, kind)
            found.append(lambda port, file=file: engines.llama_cpp(binaries, file, port))
        best = engines.requantized(binaries, source.path, "Q4_0")
        found.append(lambda port: engines.llama_cpp(binaries, best, port, slots=1))
    if "vllm" in names:
        python = engines.install_vllm()
        folder = engines.hugging_face_folder(source.path)
        found.append(lambda port: engines.vllm(python, folder, port))
    return found


def peak_rss_mb(pid: int) -> float:
    """Peak resident memory of a process and its children, in MB (sum of the peaks)."""
    total = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        status = Path(f"/proc/{one.pid}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return total / 1024


def measure(peer: engines.Peer, port: int, works: list[str], repetition: int, encode: Any) -> dict[str, Any]:
    """Start the engine, warm it up, run each workload once."""
    results: dict[str, Any] = {}
    url = f"http://127.0.0.1:{port}"
    with engines.running(peer, port) as (process, seconds):
        warm = workloads.build("w1", encode, workloads.REPETITIONS - 1)
        short = workloads.Workload("warm", warm.items[:4], [0.0] * 4, streamed=False)
        asyncio.run(client.run(url, peer.model, short))
        for work in works:
            name, _, rate = work.partition(":")
            if name in peer.skips:
                continue
            workload = workloads.build(name, encode, repetition, rate=float(rate or 8))
            results[work] = client.summarize(*asyncio.run(client.run(url, peer.model, workload)))
        results["w5"] = {"seconds": seconds, "peak_rss_mb": peak_rss_mb(process.pid)}
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: an engine a row, medians."""
    columns = [title for title, (work, _) in COLUMNS.items() if any(work in result for result in results.values())]
    lines = ["| engine | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, result in results.items():
        cells = []
        for title in columns:
            work, key = COLUMNS[title]
            value = result.get(work, {}).get("median", {}).get(key)
            cells.append("" if value is None else f"{value:.4g}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="w1,w2,w3,w4:4,w4:8")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", default="", help="llama.cpp, vllm (installed on first use)")
    parser.add_argument(
        "--options", action="append", help="a set of options for pagemill serve; may be given several times"
    )
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    tokenizer = load_tokenizer(resolve_source("smollm2-135m-instruct"))
    makers = peers_for(args.peers.split(","), args.options or [""])
    ones: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for repetition in range(args.repetitions):
        for make in makers:
            port = engines.free_port()
            peer = make(port)
            result = measure(
                peer, port, args.work.split(","), repetition, lambda t: tokenizer.encode(t, add_special_tokens=False)
            )
            for work, figures in result.items():
                ones.setdefault(peer.name, {}).setdefault(work, []).append(figures)
            shown = {work: statistics.fmean([figures.get("output_tokens_per_s", figures.get("seconds", 0))])
                     for work, figures in result.items()}  # fmt: skip
            print(f"{repetition + 1}/{args.repetitions} {peer.name}: {shown}", file=sys.stderr)
    results = {
        name: {work: {"median": report.medians(figures), "repetitions": figures} for work, figures in works.items()}
        for name, works in ones.items()
    }
    report.write(args.out, "run", {"work": args.work, "repetitions": args.repetitions}, results)
    print(table(results))
    return int(any(one.get("errors") for works in ones.values() for figures in works.values() for one in figures))


if __name__ == "__main__":
    sys.exit(main())
