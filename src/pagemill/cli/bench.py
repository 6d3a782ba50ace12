"""``pagemill bench throughput | latency | serve``: the workloads, measured; JSON out.

throughput and latency run the engine in this process; serve drives any OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

from pagemill.cli.arguments import add_config_flags, config_from, positive
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the three modes."""
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, text, work in (
        ("throughput", "offline output tokens/s of many requests at once", "w1"),
        ("latency", "offline time to first token and decode speed of one request", "w2"),
    ):
        offline = modes.add_parser(mode, help=text)
        _add_common(offline, work)
        add_config_flags(offline, EngineConfig)
    serve = modes.add_parser("serve", help="drive an OpenAI-compatible server")
    _add_common(serve, "w1,w2,w3,w4:8")
    serve.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    serve.add_argument("--model", default=None, help="name to ask for (default: the first one it lists)")
    serve.add_argument("--tokenizer", default="smollm2-135m-instruct", help="model whose tokenizer makes the prompts")
    serve.add_argument("--api-key", default=None, help="bearer token")


def _works(text: str) -> str:
    """Refused here, before a model is loaded."""
    for work in text.split(","):
        name, colon, rate = work.partition(":")
        if name not in _NAMES or (colon and name != "w4"):
            raise argparse.ArgumentTypeError(f"{work!r} is no workload; there are w1, w2, w3 and w4:RATE")
        try:
            rate_s = float(rate) if colon else 1.0
        except ValueError:
            rate_s = math.nan
        if not 0 < rate_s < math.inf:
            raise argparse.ArgumentTypeError(f"{work!r}: the rate must be a number above 0, of requests a second")
    return text


_NAMES = ("w1", "w2", "w3", "w4")


def _add_common(parser: argparse.ArgumentParser, work: str) -> None:
    parser.add_argument(
        "--work",
        default=work,
        type=_works,
        help="comma-separated workloads: w1, w2, w3, w4:RATE (default: %(default)s)",
    )
    parser.add_argument(
        "--repetitions", type=positive, default=3, help="fresh text each; the median counts (default: 3)"
    )
    parser.add_argument("--json", type=Path, default=None, help="store the whole document here")


def run(args: argparse.Namespace) -> int:
    """Run the chosen mode; print the medians as JSON."""
    from pagemill.bench import report

    results = _serve(args) if args.mode == "serve" else _offline(args)
    settings = {name: str(value) for name, value in vars(args).items() if name not in {"json", "api_key"}}
    document = report.write(args.json, f"bench {args.mode}", settings, results)
    print(json.dumps({"kind": document["kind"], "medians": {n: r["median"] for n, r in results.items()}}, indent=1))
    failed = sum(one.get("errors", 0) for result in results.values() for one in result["repetitions"])
    if failed:
        print(f"{failed} requests failed; see first_error in the JSON", file=sys.stderr)
    return 1 if failed else 0


def _offline(args: argparse.Namespace) -> dict[str, Any]:
    from pagemill.bench import offline, report, workloads

    llm = offline.open_engine(config_from(args, EngineConfig))
    measure = offline.throughput if args.mode == "throughput" else offline.latency
    results = {}
    for work in args.work.split(","):
        name, _, _ = work.partition(":")
        ones = [measure(llm, workloads.build(name, llm.tokenizer.encode, i)) for i in range(args.repetitions)]
        results[work] = {"median": report.medians(ones), "repetitions": ones}
    return results


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    try:
        from pagemill.bench import client
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError("bench serve needs aiohttp: pip install 'pagemill[bench]'") from None
    from pagemill.bench import report, workloads
    from pagemill.models.sources import resolve_source
    from pagemill.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_source(args.tokenizer))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    model = args.model or asyncio.run(client.first_model(args.base_url, args.api_key))

    def once(work: str, repetition: int) -> dict[str, Any]:
        name, _, rate = work.partition(":")
        workload = workloads.build(name, encode, repetition, rate=float(rate or 8))
        return client.summarize(*asyncio.run(client.run(args.base_url, model, workload, api_key=args.api_key)))

    once("w2", workloads.REPETITIONS - 1)
    results = {}
    for work in args.work.split(","):
        ones = [once(work, i) for i in range(args.repetitions)]
        results[work] = {"median": report.medians(ones), "repetitions": ones}
    return results
