"""How fast ``GET /health`` is answered while the server is busy, flooded and attacked; JSON out.

    python benchmarks/health.py [--seconds 10] [--phases idle,streams,...] [--json out.json] [flags]

Starts ``pagemill serve`` with the embedded model (``flags`` are serve's). A process of its own asks for /health, 40
times a second, half of them on a new connection; another makes the load. Both share the machine with the server, so
what is shown holds the time that the asking process itself waited for a core. Milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from vanishing import crowd, start

from pagemill.bench import report

EVERY_S = 0.025
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
MEGABYTES = 4 * 1024 * 1024 - 1024
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def words(size: int) -> str:
    """So many characters of text."""
    return ("the quick brown fox jumps over the lazy dog " * (size // 44 + 1))[:size]


BAD: tuple[tuple[str, str, Any], ...] = (
    ("POST", COMPLETIONS, b"{"),
    ("POST", COMPLETIONS, b"[1, 2, 3]"),
    ("POST", COMPLETIONS, b'{"prompt": ' + b"[" * 20_000),
    ("POST", COMPLETIONS, {"prompt": [5, -1, 10**9]}),
    ("POST", COMPLETIONS, {"prompt": [10**6] * 2000}),
    ("POST", COMPLETIONS, {"prompt": "a", "temperature": "hot", "n": -1, "stop": 5}),
    ("POST", COMPLETIONS, {"prompt": "a", "model": "no such model"}),
    ("POST", COMPLETIONS, {"prompt": ["a"] * 3000}),
    ("POST", CHAT, {"messages": [{"role": 5}] * 1000}),
    ("POST", CHAT, {"messages": []}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "x"}] * 100}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}),
    ("POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_none"}),
    ("GET", "/v1/responses/resp_none", b""),
    ("POST", "/v1/responses/resp_none/cancel", b""),
    ("GET", "/no/such/path", b""),
    ("DELETE", "/health", b""),
    ("POST", "/detokenize", {"tokens": [10**8] * 500}),
)
LARGE: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/tokenize", {"prompt": words(MEGABYTES)}),
    ("POST", "/tokenize", {"prompt": words(1 << 20)}),
    ("POST", "/tokenize", {"prompt": "7" * (1 << 20)}),
    ("POST", "/tokenize", {"prompt": words(1_000_000), "return_token_strs": True}),
    ("POST", COMPLETIONS, {"prompt": words(MEGABYTES)}),
    ("POST", COMPLETIONS, {"prompt": words(400_000)}),
    ("POST", COMPLETIONS, {"prompt": [words(40_000)] * 90}),
    ("POST", COMPLETIONS, {"prompt": [5] * 262_144}),
    ("POST", COMPLETIONS, {"prompt": [[5] * 100] * 2600}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": words(MEGABYTES)}]}),
    ("POST", CHAT, {"messages": [{"role": "user", "content": words(900)}] * 4000}),
    ("POST", "/v1/responses", {"input": words(MEGABYTES)}),
    ("POST", "/detokenize", {"tokens": [5000] * 262_144}),
)


async def stream(session: aiohttp.ClientSession, url: str, number: int, end: float) -> Counter[str]:
    """One answer after another, read as it comes; how many there were."""
    answers = 0
    body = {"prompt": f"Client {number} asks why.", "max_tokens": 128, "ignore_eos": True, "stream": True}
    while time.monotonic() < end:
        async with session.post(url + COMPLETIONS, json=body) as answer:
            async for _ in answer.content.iter_any():
                pass
        answers += 1
    return Counter({"answers of 128 tokens": answers})


async def send(
    session: aiohttp.ClientSession, url: str, cases: list[tuple[str, str, bytes]], number: int, end: float
) -> Counter[str]:
    """One of these requests after another; how they were answered."""
    chance, statuses = random.Random(number), Counter[str]()
    while time.monotonic() < end:
        method, path, content = chance.choice(cases)
        try:
            async with session.request(method, url + path, data=content) as answer:
                await answer.read()
                statuses[str(answer.status)] += 1
        except aiohttp.ClientError:
            statuses["closed"] += 1
    return statuses


def written(cases: tuple[tuple[str, str, Any], ...]) -> list[tuple[str, str, bytes]]:
    """Bodies as bytes."""
    return [
        (method, path, body if isinstance(body, bytes) else json.dumps(body).encode()) for method, path, body in cases
    ]


async def load(url: str, phase: str, seconds: float) -> dict[str, int]:
    """What the server is busy with in one phase; how it answered."""
    end, found = time.monotonic() + seconds, Counter[str]()
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        streams = {"idle": 0, "streams": 64}.get(phase, 16)
        jobs: list[Coroutine[Any, Any, Any]] = [stream(session, url, number, end) for number in range(streams)]
        if phase == "vanishing":
            jobs.append(crowd(int(url.rsplit(":", 1)[1]), 50, seconds, 1, stays=False))
        elif phase == "bad":
            jobs += [send(session, url, written(BAD), number, end) for number in range(16)]
        elif phase == "large":
            jobs += [send(session, url, written(LARGE), number, end) for number in range(4)]
        for counted in await asyncio.gather(*jobs):
            found.update(counted)
    return dict(found)


def ask(connection: socket.socket) -> None:
    """One GET /health on an open connection."""
    connection.sendall(HEALTH)
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(4096)
        if not part:
            raise ConnectionError("closed")
        answer += part
    if not answer.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(answer[:100])


def probe(port: int, seconds: float) -> list[float]:
    """Milliseconds that each question took."""
    end, found = time.monotonic() + seconds, []
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as kept:
        while (begun := time.monotonic()) < end:
            if len(found) % 2:
                with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as fresh:
                    ask(fresh)
            else:
                ask(kept)
            took_s = time.monotonic() - begun
            found.append(took_s * 1000)
            time.sleep(max(0.0, EVERY_S - took_s))
    return found


def worker(orders: Connection, work: Callable[..., Any]) -> None:
    """A process of its own that does as it is ordered."""
    while (order := orders.recv()) is not None:
        result = work(*order)
        orders.send(uvloop.run(result) if asyncio.iscoroutine(result) else result)


def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Every phase."""
    ends = {}
    for name, work in (("load", load), ("probe", probe)):
        ends[name], far_end = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=worker, args=(far_end, work), daemon=True).start()
    port, result = int(url.rsplit(":", 1)[1]), {}
    for phase in args.phases:
        ends["load"].send((url, phase, args.seconds))
        time.sleep(1)
        ends["probe"].send((port, args.seconds - 1))
        took = sorted(ends["probe"].recv())
        result[phase] = {
            "asked": len(took),
            "p50_ms": round(took[len(took) // 2], 2),
            "p99_ms": round(took[len(took) * 99 // 100], 2),
            "max_ms": round(took[-1], 2),
            "answers": ends["load"].recv(),
        }
        print(phase, json.dumps(result[phase]), file=sys.stderr, flush=True)
    for end in ends.values():
        end.send(None)
    return result


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--phases", type=lambda text: text.split(","), default=["idle", "streams", "vanishing", "bad", "large"]
    )
    parser.add_argument("--json", type=Path)
    args, flags = parser.parse_known_args()
    process, url = start(flags)
    try:
        result = measure(url, args)
    finally:
        process.terminate()
        process.wait()
    settings = {"seconds": args.seconds, "flags": flags}
    document = report.write(args.json, "health", settings, result)
    if args.json is None:
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
