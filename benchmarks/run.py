"""W1 to W5 against Pagemill (and, with --peers, other engines on the same work), interleaved; JSON and a table.

    python benchmarks/run.py --out benchmarks/results/today.json
    python benchmarks/run.py --peers llama.cpp,vllm --work w1,w2
    python benchmarks/run.py --isa avx2 --peers llama.cpp --work w1
    python benchmarks/run.py --shape qwen3-0.6b --peers llama.cpp,vllm --work w1/16,w2
    python benchmarks/run.py --attach "vLLM=http://127.0.0.1:8001" --attach "Pagemill=http://127.0.0.1:8000" --work w4:4

One repetition of every engine, then the next: a machine whose speed drifts then moves all of them alike. Each engine
runs alone. W5 is the time from the launch of the server to its first good completion, with the model cached.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from peers import checkpoints, engines

from pagemill.bench import client, report, workloads
from pagemill.models.sources import resolve_source
from pagemill.models.tokenizer import load_tokenizer

LATENCIES = {"TTFT p50": "ttft_p50_ms", "TTFT p99": "ttft_p99_ms", "ITL p99": "itl_p99_ms"}


def columns_of(work: str) -> dict[str, str]:
    """Title -> figure, of what a workload is for."""
    if work.startswith("w4"):
        return {f"{work} {title}": key for title, key in LATENCIES.items()}
    if work.startswith("w2"):
        return {"w2 TTFT ms": "ttft_p50_ms", "w2 tok/s": "decode_tokens_per_s"}
    return {"w5 s": "seconds", "peak MB": "peak_rss_mb"} if work == "w5" else {f"{work} tok/s": "output_tokens_per_s"}


def weights(shape: str) -> tuple[Path, Callable[[], Path]]:
    """The GGUF file that others are made from, and what makes the safetensors folder."""
    embedded = resolve_source("smollm2-135m-instruct").path
    if shape == "smollm2-135m":
        return embedded, lambda: engines.hugging_face_folder(embedded)
    file, folder = engines.BUILD / f"{shape}-noise.BF16.gguf", engines.BUILD / f"{shape}-noise"
    checkpoints.noise_gguf(checkpoints.QWEN3_0_6B, embedded, file)
    return file, lambda: checkpoints.noise_folder(checkpoints.QWEN3_0_6B, engines.hugging_face_folder(embedded), folder)


def peers_for(names: list[str], options: list[str], isa: str | None, shape: str) -> list[Callable[[int], engines.Peer]]:
    """A constructor, given a port, for each engine to run; Pagemill first, once per set of options."""
    original, folder = weights(shape)
    models = [None] if shape == "smollm2-135m" else [
        str(engines.requantized(engines.install_llama_cpp(), original, "Q4_0")), str(folder())
    ]  # fmt: skip
    found: list[Callable[[int], engines.Peer]] = [
        lambda port, extra=extra, model=model: engines.pagemill(port, *extra.split(), model=model, isa=isa)
        for model in models for extra in options
    ]  # fmt: skip
    if "llama.cpp" in names:
        binaries = engines.install_llama_cpp(isa)
        for kind in ("Q4_0", "Q8_0", "BF16") if shape == "smollm2-135m" else ("Q4_0",):
            file = engines.requantized(binaries, original, kind)
            found.append(lambda port, file=file: engines.llama_cpp(binaries, file, port))
        best = engines.requantized(binaries, original, "Q4_0")
        found.append(lambda port: engines.llama_cpp(binaries, best, port, slots=1))
    if "vllm" in names:
        python = engines.install_vllm()
        found.append(lambda port: engines.vllm(python, folder(), port))
    return found


def peak_rss_mb(pid: int) -> float:
    """Peak resident memory of a process and its children, in MB (sum of the peaks)."""
    total = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        status = Path(f"/proc/{one.pid}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return total / 1024


def works_of(url: str, peer: engines.Peer, works: list[str], text: int, encode: Any) -> dict[str, Any]:
    """Run each workload once with the ``text``-th text."""
    results: dict[str, Any] = {}
    for work in works:
        name, _, rate = work.partition(":")
        name, _, count = name.partition("/")  # w1/16: the first 16 requests
        if name in peer.skips:
            continue
        workload = workloads.build(name, encode, text, rate=float(rate or 8))
        if count:
            items, arrivals = workload.items[: int(count)], workload.arrivals_s[: int(count)]
            workload = workloads.Workload(name, items, arrivals, workload.streamed)
        results[work] = client.summarize(*asyncio.run(client.run(url, peer.model, workload)))
    return results


def warm(url: str, peer: engines.Peer, encode: Any) -> None:
    """Four requests of a text that nothing else uses."""
    items = workloads.build("w1", encode, workloads.REPETITIONS - 1).items[:4]
    asyncio.run(client.run(url, peer.model, workloads.Workload("warm", items, [0.0] * 4, streamed=False)))


def measure(peer: engines.Peer, port: int, works: list[str], text: int, encode: Any) -> dict[str, Any]:
    """Start the engine, warm it up, run each workload once."""
    url = f"http://127.0.0.1:{port}"
    with engines.running(peer, port) as (process, seconds):
        warm(url, peer, encode)
        results = works_of(url, peer, works, text, encode)
        results["w5"] = {"seconds": seconds, "peak_rss_mb": peak_rss_mb(process.pid)}
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: an engine a row, medians."""
    works = list(dict.fromkeys(work for result in results.values() for work in result))
    columns = [(work, title, key) for work in works for title, key in columns_of(work).items()]
    lines = ["| engine | " + " | ".join(title for _, title, _ in columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, result in results.items():
        values = [result.get(work, {}).get("median", {}).get(key) for work, _, key in columns]
        lines.append(f"| {name} | " + " | ".join("" if value is None else f"{value:.4g}" for value in values) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", default="w1,w2,w3,w4:4,w4:8", help="w4:8 arrive at 8 a second; w1/16 are the first 16 requests of w1"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", default="", help="llama.cpp, vllm (installed on first use)")
    parser.add_argument(
        "--options", action="append", help="a set of options for pagemill serve; may be given several times"
    )
    parser.add_argument(
        "--isa", choices=tuple(engines.LLAMA_ISAS), help="hold Pagemill and llama.cpp to these instructions"
    )
    parser.add_argument("--shape", default="smollm2-135m", choices=("smollm2-135m", "qwen3-0.6b"), help="qwen3: noise")
    parser.add_argument(
        "--attach", action="append", metavar="NAME=URL",
        help="measure servers that run already, in turn, in place of starting any; they must call their model m",
    )  # fmt: skip
    parser.add_argument("--first-text", type=int, default=0, help="0 to 8: servers that saw a text have its prefixes")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> int:
    """Run and report."""
    args = arguments()
    tokenizer = load_tokenizer(resolve_source("smollm2-135m-instruct"))
    works = args.work.split(",")
    ones: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    attached = [tuple(one.split("=", 1)) for one in args.attach or []]
    makers = [] if attached else peers_for(args.peers.split(","), args.options or [""], args.isa, args.shape)
    for repetition in range(args.repetitions):
        text = (args.first_text + repetition) % (workloads.REPETITIONS - 1)
        for maker in attached or makers:
            if isinstance(maker, tuple):
                peer, url = engines.Peer(maker[0], []), maker[1]
                if repetition == 0:
                    warm(url, peer, encode)
                result = works_of(url, peer, works, text, encode)
            else:
                port = engines.free_port()
                peer = maker(port)
                result = measure(peer, port, works, text, encode)
            for work, figures in result.items():
                ones.setdefault(peer.name, {}).setdefault(work, []).append(figures)
            shown = {work: round(figures.get("output_tokens_per_s", figures.get("seconds", 0)), 1)
                     for work, figures in result.items()}  # fmt: skip
            print(f"{repetition + 1}/{args.repetitions} {peer.name}: {shown}", file=sys.stderr, flush=True)
    results = {
        name: {work: {"median": report.medians(figures), "repetitions": figures} for work, figures in works.items()}
        for name, works in ones.items()
    }
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report.write(args.out, "run", settings, results)
    print(table(results))
    return int(any(one.get("errors") for works in ones.values() for figures in works.values() for one in figures))


if __name__ == "__main__":
    sys.exit(main())
