"""How long streams pause while someone sends a long prompt, and what the prompt pays for it; a table and JSON out.

    python benchmarks/stalls.py [--streams 1,16] [--prompt 7500] [--limits 0,100] [--repetitions 2]
        [--options "--quantization int8"] [--out FILE]

One server for each value of ``--max-stall-ms``, all of them up, asked in turn; 0: no limit but a step's 2,048 tokens.
The streams decode, then one request of ``prompt`` random token ids and one output token comes. Seconds: the longest
pause of any stream while the prompt is computed, the median one, and the prompt's time to its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from peers import engines

from pagemill.bench import client, report
from pagemill.bench.workloads import Item

SETTLED_S = 1.0
"""How long the streams run before the prompt comes."""
STREAM_TOKENS = 4000
RANDOM_IDS = (1000, 40_000)


async def pauses(url: str, num_streams: int, prompt_tokens: int, rng: random.Random) -> dict[str, float]:
    """One prompt beside the streams, which are cut off when it is done."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        reading = [client.Answer(start_s=time.perf_counter()) for _ in range(num_streams)]
        streams = [asyncio.create_task(read(session, url, answer, rng)) for answer in reading]
        await asyncio.sleep(SETTLED_S)
        begun_s = time.perf_counter()
        body = {"model": "m", "prompt": ids(prompt_tokens, rng), "max_tokens": 1, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()
        ended_s = time.perf_counter()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    gaps = sorted(
        after - before
        for answer in reading
        for before, after in pairwise(answer.chunk_times_s)
        if after > begun_s and before < ended_s
    )
    return {"longest_pause_s": gaps[-1], "median_pause_s": gaps[len(gaps) // 2], "prompt_s": ended_s - begun_s}


async def read(session: aiohttp.ClientSession, url: str, answer: client.Answer, rng: random.Random) -> None:
    """A stream, noting when its tokens come."""
    item = Item(ids(16, rng), STREAM_TOKENS)
    body = {"model": "m", "prompt": item.prompt, "max_tokens": item.output_tokens, "ignore_eos": True, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                answer.chunk_times_s.append(time.perf_counter())


def ids(count: int, rng: random.Random) -> list[int]:
    """A prompt that no cache knows."""
    return [rng.randrange(*RANDOM_IDS) for _ in range(count)]


def main() -> int:
    """Measure in turn, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--prompt", type=int, default=7500)
    parser.add_argument("--limits", default="0,100", help="values of --max-stall-ms")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--options", default="--quantization int8", help="of pagemill serve")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rng = random.Random(time.time_ns())
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as servers:
        urls = {}
        for limit in args.limits.split(","):
            port = engines.free_port()
            servers.enter_context(
                engines.running(engines.pagemill(port, *args.options.split(), "--max-stall-ms", limit), port)
            )
            urls[limit] = f"http://127.0.0.1:{port}"
        for _ in range(args.repetitions):
            for num_streams in map(int, args.streams.split(",")):
                for limit, url in urls.items():
                    ones = asyncio.run(pauses(url, num_streams, args.prompt, rng))
                    name = f"--max-stall-ms {limit}, {num_streams} streams"
                    results.setdefault(name, {"repetitions": []})["repetitions"].append(ones)
                    print(name, {key: round(value, 3) for key, value in ones.items()}, flush=True)
    for result in results.values():
        result["median"] = report.medians(result["repetitions"])
    report.write(args.out, "stalls", {"options": args.options, "prompt": args.prompt}, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
