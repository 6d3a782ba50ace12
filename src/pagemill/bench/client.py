"""Drives any OpenAI-compatible server with a workload and times what comes back.

Prompts go as token ids to /v1/completions, greedy, past end-of-text; a server is streamed from only where latency is
measured, so that the client costs it as little as possible elsewhere. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pagemill.bench.workloads import Item, Workload

__all__ = ["Answer", "first_model", "percentile", "run", "summarize"]

TIGHT_SLO = (0.5, 0.05)
"""Time to first token and time per output token, seconds."""


@dataclass(slots=True)
class Answer:
    """What one request got, and when."""

    start_s: float
    end_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


async def first_model(url: str, api_key: str | None = None) -> str:
    """The first model that the server lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def run(url: str, model: str, workload: Workload, *, api_key: str | None = None) -> tuple[list[Answer], float]:
    """Send the workload; returns an answer per request and the wall time in seconds."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=1800)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                _send(session, url, model, item, start + arrival, streamed=workload.streamed)
                for item, arrival in zip(workload.items, workload.arrivals_s, strict=True)
            )
        )
        return list(answers), time.perf_counter() - start


async def _send(
    session: aiohttp.ClientSession, url: str, model: str, item: Item, at_s: float, *, streamed: bool
) -> Answer:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    body: dict[str, Any] = {
        "model": model,
        "prompt": item.prompt,
        "max_tokens": item.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streamed,
    }
    if streamed:
        body["stream_options"] = {"include_usage": True}
    answer = Answer(start_s=time.perf_counter())
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            elif streamed:
                await _read_stream(response, answer)
            else:
                _read_usage((await response.json())["usage"], answer)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = repr(error)
    answer.end_s = time.perf_counter()
    if answer.error is None and answer.output_tokens != item.output_tokens:
        answer.error = f"asked for {item.output_tokens} tokens, got {answer.output_tokens}"
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])
            return
        if event.get("usage"):
            _read_usage(event["usage"], answer)
        choices = event.get("choices")
        # A chunk without text still carries a token (half a code point, say), unless it is the closing one.
        if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
            answer.chunk_times_s.append(time.perf_counter())


def _read_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.output_tokens = usage.get("completion_tokens") or 0
    answer.prompt_tokens = usage.get("prompt_tokens") or 0
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between closest ranks; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(answers: Sequence[Answer], wall_s: float) -> dict[str, Any]:
    """Throughput, latency percentiles (milliseconds) and goodput of one repetition."""
    good = [answer for answer in answers if answer.error is None]
    output = sum(answer.output_tokens for answer in good)
    timed = [answer for answer in good if answer.chunk_times_s]
    ttft = [answer.chunk_times_s[0] - answer.start_s for answer in timed]
    gaps = [
        after - before
        for answer in timed
        for before, after in zip(answer.chunk_times_s, answer.chunk_times_s[1:], strict=False)
    ]
    tpot = {
        id(answer): (answer.chunk_times_s[-1] - answer.chunk_times_s[0]) / (answer.output_tokens - 1)
        for answer in timed
        if answer.output_tokens > 1
    }
    within = sum(
        first <= TIGHT_SLO[0] and tpot.get(id(answer), 0.0) <= TIGHT_SLO[1]
        for first, answer in zip(ttft, timed, strict=True)
    )
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "first_error": next((answer.error for answer in answers if answer.error), None),
        "wall_s": wall_s,
        "input_tokens": sum(answer.prompt_tokens for answer in good),
        "output_tokens": output,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens_per_s": output / wall_s,
        "ttft_p50_ms": _ms(percentile(ttft, 50)),
        "ttft_p99_ms": _ms(percentile(ttft, 99)),
        "itl_p50_ms": _ms(percentile(gaps, 50)),
        "itl_p99_ms": _ms(percentile(gaps, 99)),
        "decode_tokens_per_s": 1 / statistics.median(tpot.values()) if tpot else None,
        "slo_share": within / len(answers) if timed else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
