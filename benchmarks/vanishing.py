"""What clients that vanish cost the others: tokens per second of steady clients, alone and beside a crowd; JSON out.

    python benchmarks/vanishing.py [--rates 17,50] [--seconds 20] [--turns 3] [--steady 16] [--json out.json] [flags]

Starts ``pagemill serve`` with the embedded model (``flags`` are serve's). Steady clients ask again and again for 32
tokens. In every turn they are measured alone, and beside crowds that ask for the same: one for each of ``--rates``
(clients a second) whose clients connect, send and vanish at random points, and one at the first rate whose clients
stay to the end. A crowd's ratio is its median over the turns, each against the phases alone before and after it. The
seconds of CPU that each process took are shown: all share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from pagemill.bench import report
from pagemill.bench.vanishing import stay, vanish

TOKENS = 32
LONGEST_S = 0.25
"""After sending everything, a client of a crowd that vanishes stays no longer."""
SETTLE_S = 1.0
"""Between phases."""
SHOWN = ("generation_tokens", "prompt_tokens", "request_success")
"""Of the server's counters, what is shown for each phase."""


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


async def steady(session: aiohttp.ClientSession, url: str, number: int, seconds: float) -> float:
    """One client that asks again and again; its tokens per second, of whole answers only."""
    tokens, begun = 0, time.monotonic()
    body = {"prompt": f"Client {number} asks: why is the sky blue?", "max_tokens": TOKENS, "ignore_eos": True}
    while True:
        async with session.post(url + "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()
        tokens += TOKENS
        passed_s = time.monotonic() - begun
        if passed_s > seconds:
            return tokens / passed_s


async def crowd(port: int, rate: float, seconds: float, seed: int, *, stays: bool) -> Counter[str]:
    """So many clients a second; where each of them went."""
    chance, begun = random.Random(seed), time.monotonic()

    async def one(number: int) -> str:
        body = {
            "prompt": f"Number {seed}-{number}: why?",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        if stays:
            return "answered 200" if b" 200 OK" in await stay(port, "/v1/completions", body) else "refused"
        return await vanish(port, "/v1/completions", body, chance, longest_s=LONGEST_S)

    running = []
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
        running.append(asyncio.create_task(one(number)))
    return Counter(await asyncio.gather(*running))


def crowds(orders: Connection) -> None:
    """A process of its own: one crowd after another, as ordered; answers with where they went and its CPU seconds."""
    while (order := orders.recv()) is not None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        points = uvloop.run(crowd(**order))
        after = resource.getrusage(resource.RUSAGE_SELF)
        orders.send((points, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


class Bench:
    """One server, one process for crowds, and this process for the steady clients."""

    def __init__(self, url: str, server_pid: int, orders: Connection, args: argparse.Namespace) -> None:
        self.url = url
        self.port = int(url.rsplit(":", 1)[1])
        self.args = args
        self.orders = orders
        front = psutil.Process(server_pid)
        self.processes = {"front": front, "engine": front.children()[0], "steady": psutil.Process(os.getpid())}
        self.seed = 0
        self.session: aiohttp.ClientSession

    async def run(self) -> dict[str, Any]:
        """Every turn."""
        rates = self.args.rates
        kinds = [("vanish", rate) for rate in rates] + ([("stay", rates[0])] if self.args.staying else [])
        found: dict[str, list[dict[str, Any]]] = {f"{kind} {rate:g}/s": [] for kind, rate in kinds}
        timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self.session:
            await self.phase(None, 2.0)
            alone = [await self.phase(None)]
            for _ in range(self.args.turns):
                for kind, rate in kinds:
                    result = await self.phase((kind, rate))
                    alone.append(await self.phase(None))
                    around = (alone[-2]["steady_tokens_per_s"] + alone[-1]["steady_tokens_per_s"]) / 2
                    result["ratio"] = round(result["steady_tokens_per_s"] / around, 4)
                    found[f"{kind} {rate:g}/s"].append(result)
                    print(f"{kind} {rate:g}/s: {result['ratio']:.1%}", file=sys.stderr)
            await asyncio.sleep(SETTLE_S)
            left = await self.figures()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ratios = {name: round(statistics.median(each["ratio"] for each in turns), 4) for name, turns in found.items()}
        return {"ratios": ratios, "left": {name: left[name] for name in names}, "alone": alone, "crowds": found}

    async def phase(self, order: tuple[str, float] | None, seconds: float | None = None) -> dict[str, Any]:
        """Steady clients, alone or beside a crowd."""
        await asyncio.sleep(SETTLE_S)
        seconds = seconds or self.args.seconds
        self.seed += 1
        cpu, counted, begun = self.cpu_s(), await self.figures(), time.monotonic()
        if order is not None:
            kind, rate = order
            self.orders.send(
                {"port": self.port, "rate": rate, "seconds": seconds, "seed": self.seed, "stays": kind == "stay"}
            )
        clients = (steady(self.session, self.url, number, seconds) for number in range(self.args.steady))
        rates = await asyncio.gather(*clients)
        passed_s = time.monotonic() - begun
        spent = {name: round((after - cpu[name]) / passed_s, 3) for name, after in self.cpu_s().items()}
        after = await self.figures()
        result: dict[str, Any] = {"steady_tokens_per_s": round(sum(rates), 1)}
        result |= {f"{name}_per_s": round((after[name] - counted[name]) / passed_s, 1) for name in SHOWN}
        if order is not None:
            points, crowd_s = await asyncio.to_thread(self.orders.recv)
            spent["crowd"] = round(crowd_s / passed_s, 3)
            result["clients"] = dict(points)
        result["cores"] = spent
        print(order or "alone", json.dumps(result), file=sys.stderr)
        return result

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU by process, so far."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}

    async def figures(self) -> dict[str, float]:
        """Totals of /metrics by name, over their labels."""
        async with self.session.get(self.url + "/metrics") as answer:
            text = await answer.text()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^vllm:(\w+?)(?:_total)?(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        return found


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=lambda text: [float(each) for each in text.split(",")], default=[17.0, 50.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steady", type=int, default=16)
    parser.add_argument("--staying", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    orders, far_end = multiprocessing.Pipe()
    crowding = multiprocessing.get_context("spawn").Process(target=crowds, args=(far_end,), daemon=True)
    crowding.start()
    process, url = start(flags)
    try:
        result = uvloop.run(Bench(url, process.pid, orders, args).run())
    finally:
        orders.send(None)
        process.terminate()
        process.wait()
    settings = {name: getattr(args, name) for name in ("rates", "seconds", "turns", "steady")} | {"flags": flags}
    document = report.write(args.json, "vanishing", settings, result)
    if args.json is None:
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
