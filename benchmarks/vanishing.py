"""What clients that vanish cost the others: tokens per second of steady clients, alone and beside a crowd; JSON out.

    python benchmarks/vanishing.py [--clients 1000] [--seconds 20] [--steady 16] [--json out.json] [serve's flags]

Starts ``pagemill serve`` with the embedded model. Steady clients ask again and again for 32 tokens, for so many seconds
each: alone, beside a crowd whose clients connect, send and vanish at random points, and alone again. What a vanished
client had asked for is computed until it is gone, so the crowd's own share of the work is shown as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from pagemill.bench.vanishing import vanish

TOKENS = 32
LONGEST_S = 0.25
"""After sending everything, a client of the crowd stays no longer."""


def start(flags: list[str]) -> tuple[subprocess.Popen[str], str]:
    """The server and its address."""
    command = [sys.executable, "-m", "pagemill", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"web page: (http://\S+)/", line)
        if found:
            return process, found[1]
    raise SystemExit(f"the server ended with {process.wait()}")


async def steady(session: aiohttp.ClientSession, url: str, number: int, seconds: float) -> int:
    """One client that asks again and again; its tokens."""
    tokens, end = 0, time.monotonic() + seconds
    body = {"prompt": f"Client {number} asks: why is the sky blue?", "max_tokens": TOKENS, "ignore_eos": True}
    while True:
        async with session.post(url + "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()
        if time.monotonic() > end:
            return tokens
        tokens += TOKENS


async def crowd(url: str, clients: int, seconds: float) -> Counter[str]:
    """So many clients, evenly over the time; where each of them went."""
    chance, port, begun = random.Random(5), int(url.rsplit(":", 1)[1]), time.monotonic()
    running = []
    for number in range(clients):
        await asyncio.sleep(max(0.0, begun + seconds * number / clients - time.monotonic()))
        body = {"prompt": f"Vanishing {number}", "max_tokens": 200, "ignore_eos": True, "stream": number % 2 == 0}
        running.append(asyncio.create_task(vanish(port, "/v1/completions", body, chance, longest_s=LONGEST_S)))
    return Counter(await asyncio.gather(*running))


async def figures(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Totals of /metrics by name, over their labels."""
    async with session.get(url + "/metrics") as answer:
        text = await answer.text()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """The three phases."""
    result: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(steady(session, url, number, 2) for number in range(args.steady)))
        for phase in ("alone", "beside the crowd", "alone again"):
            before = await figures(session, url)
            going = asyncio.create_task(crowd(url, args.clients if "crowd" in phase else 0, args.seconds))
            counts = await asyncio.gather(*(steady(session, url, each, args.seconds) for each in range(args.steady)))
            points = await going
            after = await figures(session, url)
            produced = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
            result[phase] = {
                "steady_tokens_per_s": sum(counts) / args.seconds,
                "all_tokens_per_s": produced / args.seconds,
                "vanished": dict(points),
            }
            print(phase, json.dumps(result[phase]), file=sys.stderr)
        await asyncio.sleep(1)
        left = await figures(session, url)
        result["left"] = {
            name: left[name]
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        }
    alone = (result["alone"]["steady_tokens_per_s"] + result["alone again"]["steady_tokens_per_s"]) / 2
    result["ratio"] = result["beside the crowd"]["steady_tokens_per_s"] / alone
    return result


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--steady", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    process, url = start(flags)
    try:
        result = asyncio.run(measure(url, args))
    finally:
        process.terminate()
        process.wait()
    settings = {"clients": args.clients, "seconds": args.seconds, "steady": args.steady, "flags": flags}
    document = json.dumps({"benchmark": "vanishing", "settings": settings, "results": result}, indent=1)
    if args.json:
        args.json.write_text(document + "\n")
    else:
        print(document)


if __name__ == "__main__":
    main()
