"""A request's tokens and log probabilities depend on the request alone, bit for bit, on the native kernels.

Tiny checkpoints by default; among the slow tests the embedded model in three forms, with 200 requests each.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pagemill.config import DEFAULT_MODEL, EngineConfig
from pagemill.core.messages import EngineRequest, TokenLogprobs
from pagemill.core.scheduler import Scheduler
from pagemill.worker.executor import InprocExecutor
from tests.models.tiny import VOCAB_SIZE, tiny_checkpoint
from tests.worker.serving import Answer, request, serve

native = pytest.importorskip("pagemill._native")

TINY: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},  # and an int8 KV cache
    "int8, bfloat16 KV": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
}
REAL: dict[str, dict[str, Any]] = {
    "the embedded file": {},
    "the embedded model, bfloat16": {"dtype": "bfloat16"},
    "the embedded model, int8": {"quantization": "int8"},
}
MARKS = (pytest.mark.slow, pytest.mark.timeout(3600))
WEIGHTS = [*TINY, *(pytest.param(name, marks=MARKS) for name in REAL)]

MAX_TOKENS = 512
MAX_SEQS = 64
WAYS: list[dict[str, Any]] = [
    {"max_num_seqs": 64, "chunk": 1, "max_num_batched_tokens": 64},
    {"max_num_seqs": 5, "chunk": 7, "max_num_batched_tokens": 33},
    {"max_num_seqs": 40, "chunk": 61, "max_num_batched_tokens": 200},
    {"max_num_seqs": 17, "max_num_batched_tokens": 17, "caching": False},
    {"max_num_seqs": 64, "chunk": 512, "max_num_batched_tokens": 512},
]
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": MAX_TOKENS, "caching": False}

Told = dict[str, tuple[list[int], bytes, bytes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, max_position_embeddings=1024)


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def executor(weights: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InprocExecutor]:
    real = weights in REAL
    config = EngineConfig(
        model=DEFAULT_MODEL if real else str(folder),
        kernels="native",
        num_threads=2,
        max_model_len=1024,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        kv_cache_memory_bytes=(256 if real else 8) << 20,
        **(REAL | TINY)[weights],
    )
    with pytest.MonkeyPatch.context() as patch:
        if not real:
            patch.setenv("PAGEMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = InprocExecutor.create(config)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def requests(weights: str) -> list[EngineRequest]:
    """Greedy and seeded, of many lengths, some with common prefixes and some with every feature."""
    count = 200 if weights in REAL else 32
    rng = np.random.default_rng(7)
    common = rng.integers(5, VOCAB_SIZE, 600).tolist()
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3, "prompt_logprobs": 1},
    ]
    made = []
    for i in range(count):
        own = rng.integers(5, VOCAB_SIZE, int(rng.integers(1, 40))).tolist()
        shared = int(rng.integers(500, 600)) if i % 16 == 1 else int(rng.integers(0, 60)) * (i % 2)
        length = int(rng.integers(1, 14)) if i % 4 else int(rng.integers(24, 40))
        made.append(request_of(f"r{i}", common[:shared] + own, seed=i, max_tokens=length, **kinds[i % len(kinds)]))
    return made


@pytest.fixture(scope="module")
def alone(executor: InprocExecutor, requests: list[EngineRequest]) -> Told:
    """What each is told when it is the only one, its prompt in one piece, without a cache."""
    native.set_num_threads(2)
    return told(serve(executor, requests, **ALONE)[0])


def request_of(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    return request(name, prompt, logprobs=3, **params)


def told(answers: dict[str, Answer]) -> Told:
    """Tokens, and log probabilities as bytes: == would let -0.0 pass for 0.0."""
    return {
        name: (answer.tokens, in_bytes(answer.logprobs), in_bytes(answer.prompt_logprobs))
        for name, answer in answers.items()
    }


def in_bytes(positions: list[TokenLogprobs]) -> bytes:
    return b"".join(struct.pack("<qdq", *candidate) for position in positions for candidate in position)


def differing(got: Told, want: Told) -> list[str]:
    assert got.keys() == want.keys()
    return [name for name in want if got[name] != want[name]]


def in_some_order(requests: list[EngineRequest], seed: int) -> list[EngineRequest]:
    return [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_nothing_but_the_request_decides_its_bits(
    executor: InprocExecutor, requests: list[EngineRequest], alone: Told, way: int
) -> None:
    """Batches, chunks and threads of every kind; then again with what the cache holds by now."""
    native.set_num_threads(1 + way % 2)
    answers, scheduler = serve(executor, in_some_order(requests, way), **WAYS[way])
    assert not differing(told(answers), alone)
    if not WAYS[way].get("caching", True):
        return
    native.set_num_threads(2 - way % 2)
    before = scheduler.stats().prefix_hit_tokens_total
    answers, _ = serve(executor, in_some_order(requests, way + 100), scheduler=scheduler)
    assert scheduler.stats().prefix_hit_tokens_total > before
    assert not differing(told(answers), alone)


@pytest.mark.parametrize("threads", [1, 2])
def test_preemption_decides_nothing(
    executor: InprocExecutor, requests: list[EngineRequest], alone: Told, threads: int
) -> None:
    """Four fit as they come, and grow into what fits two."""
    native.set_num_threads(threads)
    few = tuple(msgspec.structs.replace(spec, num_blocks=12) for spec in executor.kv_specs)
    growing = [entry for entry in requests if entry.max_tokens >= 24 and len(entry.prompt_token_ids) < 100]
    scheduler = Scheduler(
        few, max_num_seqs=MAX_SEQS, max_num_batched_tokens=(MAX_TOKENS, 50)[threads - 1], max_model_len=140
    )
    answers, _ = serve(executor, in_some_order(growing, threads), scheduler=scheduler)
    assert scheduler.stats().num_preemptions_total > 1
    assert not differing(told(answers), {entry.request_id: alone[entry.request_id] for entry in growing})


def test_the_number_of_rows_decides_nothing(executor: InprocExecutor) -> None:
    """From 8 rows for each thread on, a thread takes whole rows; below, the threads share each product's columns."""
    lives = [3] * 47 + [5, 7, *[9] * 7, *[11] * 7, 13]  # steps of 64, 17, 16, 15, 8 rows and 1
    rng = np.random.default_rng(8)
    requests = [
        request_of(f"r{i}", rng.integers(5, VOCAB_SIZE, 1).tolist(), temperature=i % 2, seed=i, max_tokens=life)
        for i, life in enumerate(lives)
    ]
    native.set_num_threads(2)
    alone = told(serve(executor, requests, **ALONE)[0])
    for threads in (1, 2):
        native.set_num_threads(threads)
        rows: list[int] = []
        answers, _ = serve(executor, requests, max_num_seqs=64, rows=rows)
        assert set(rows) == {64, 17, 16, 15, 8, 1}
        assert not differing(told(answers), alone)
