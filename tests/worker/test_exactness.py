"""A request's tokens and log probabilities depend on the request alone, bit for bit, on the native kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineRequest
from pagemill.worker.executor import InprocExecutor
from tests.models.tiny import VOCAB_SIZE, tiny_checkpoint
from tests.worker.serving import Answer, request, serve

native = pytest.importorskip("pagemill._native")

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},  # and an int8 KV cache
    "int8, bfloat16 KV": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
}
NUM_REQUESTS = 32
WAYS = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "chunk": 1},
    {"max_num_seqs": 32, "chunk": 7, "max_num_batched_tokens": 33},
    {"max_num_seqs": 32, "max_num_batched_tokens": 512},
    {"max_num_seqs": 9, "max_num_batched_tokens": 17, "caching": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture(scope="module", params=WEIGHTS)
def executor(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> InprocExecutor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return start(folder, request.param)


def start(folder: Path, weights: str, **config: Any) -> InprocExecutor:
    return InprocExecutor.create(
        EngineConfig(
            model=str(folder),
            kernels="native",
            max_num_seqs=NUM_REQUESTS,
            max_num_batched_tokens=512,
            **{"num_threads": 2, "kv_cache_memory_bytes": 8 << 20, **WEIGHTS[weights], **config},
        )
    )


def requests() -> list[EngineRequest]:
    """Greedy and seeded, of many lengths, some with common prefixes and some with every feature."""
    rng = np.random.default_rng(7)
    common = rng.integers(5, VOCAB_SIZE, 48).tolist()
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3, "prompt_logprobs": 1},
    ]
    made = []
    for i in range(NUM_REQUESTS):
        own = rng.integers(5, VOCAB_SIZE, int(rng.integers(1, 60))).tolist()
        prompt = common[: int(rng.integers(0, 49))] + own if i % 2 else own
        length = int(rng.integers(1, 20))
        made.append(request(f"r{i}", prompt, logprobs=3, seed=i, max_tokens=length, **kinds[i % len(kinds)]))
    return made


def told(answers: dict[str, Answer]) -> dict[str, tuple[object, ...]]:
    return {name: (answer.tokens, answer.logprobs, answer.prompt_logprobs) for name, answer in answers.items()}


def test_nothing_but_the_request_decides_its_bits(executor: InprocExecutor) -> None:
    alone = told(serve(executor, requests(), **WAYS[0])[0])
    for seed, way in enumerate(WAYS[1:]):
        order = np.random.default_rng(seed).permutation(NUM_REQUESTS)
        answers, scheduler = serve(executor, [requests()[i] for i in order], **way)
        assert told(answers) == alone
        assert told(serve(executor, requests(), scheduler=scheduler)[0]) == alone, "with what the cache holds now"


def test_preemption_and_the_number_of_threads_decide_nothing(
    executor: InprocExecutor, folder: Path, request: pytest.FixtureRequest
) -> None:
    weights = request.node.callspec.params["executor"]
    alone = told(serve(executor, requests())[0])
    small = start(folder, weights, num_gpu_blocks_override=10, num_threads=1)
    answers, scheduler = serve(small, requests(), max_num_seqs=32)
    assert scheduler.stats().num_preemptions_total > 0
    assert told(answers) == alone
