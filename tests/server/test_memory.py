"""What the processes hold: no more than weights, cache and a share; and large requests leave nothing behind."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from pagemill.bench import client, workloads
from pagemill.models.sources import ModelSource
from pagemill.models.tokenizer import load_tokenizer
from pagemill.server import memory
from tests.server.conftest import Served
from tests.server.process import serve_process

KV_BYTES = 256 << 20
"""Room for all requests of W1 at once in eight bits, and all backed with memory."""
REST_BYTES = 350_000_000
"""Code and libraries of both processes (PyTorch's are 160 MB of it), the tokenizer, logits and activations."""


async def test_memory_is_given_back_after_large_requests_and_not_after_small_ones(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PAUSE_S", 0.05)
    loop, asked, given_back = asyncio.get_running_loop(), [], asyncio.Event()

    def trim(kept: int) -> int:
        asked.append(len(served.engine.seen))
        loop.call_soon_threadsafe(given_back.set)
        return 1

    served.app.context.memory._trim = trim
    await served.http.post("/v1/completions", json={"prompt": "a"})
    for _ in range(3):
        await served.http.post("/v1/completions", json={"prompt": [7] * 200_000, "max_tokens": 1})
    async with asyncio.timeout(60):
        await given_back.wait()
    assert asked
    assert 1 not in asked


def test_the_c_library_is_asked_where_it_can_be() -> None:
    trim = memory._malloc_trim()
    assert trim is None or trim(0) in {0, 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_64_requests_take_the_weights_once_the_cache_and_350_mb(embedded_source: ModelSource) -> None:
    """W1 on the embedded model: both processes at their highest, what they share counted once."""
    tokenizer = load_tokenizer(embedded_source)
    work = workloads.build("w1", lambda text: tokenizer.encode(text, add_special_tokens=False), 0)
    with serve_process("--kv-cache-memory-bytes", str(KV_BYTES)) as server:
        answers, _ = await client.run(server.url, await client.first_model(server.url), work)
        assert {answer.error for answer in answers} == {None}
        peak = sum(peak_bytes(pid) for pid in (server.process.pid, server.engine_pid))
    rest = peak - embedded_source.path.stat().st_size - KV_BYTES
    assert 0 < rest < REST_BYTES


def peak_bytes(pid: int) -> int:
    """A process's share of memory now, and what it once had more."""

    def kib(file: str, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/{file}").read_text(), re.M)
        assert found is not None
        return int(found[1])

    return 1024 * (kib("smaps_rollup", "Pss") + kib("status", "VmHWM") - kib("status", "VmRSS"))
