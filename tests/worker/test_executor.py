"""A real (tiny) model, start to finish: what is planned never changes what is said."""

import importlib.util
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineRequest
from pagemill.errors import ConfigError, EngineError, MemoryPlanError
from pagemill.kernels.ops import StepInputs
from pagemill.worker.backend import Computed
from pagemill.worker.executor import InprocExecutor
from tests.models.tiny import VOCAB_SIZE, tiny_checkpoint
from tests.worker.serving import Answer, request, serve

FAMILIES = ["llama", "gemma3"]  # full attention; sliding windows and full attention mixed
HAS_NATIVE = importlib.util.find_spec("pagemill._native") is not None
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    for family in FAMILIES:
        tiny_checkpoint(family, root / family)
    return root


def start(path: Path, **config: object) -> InprocExecutor:
    defaults: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "kernels": "reference",
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 4 << 20,
    }
    return InprocExecutor.create(EngineConfig(model=str(path), **{**defaults, **config}))  # type: ignore[arg-type]


def prompts(count: int = 10) -> list[EngineRequest]:
    """Short and long ones, at and around block borders, some with a prefix in common."""
    rng = np.random.default_rng(0)
    shared = rng.integers(5, VOCAB_SIZE, 16).tolist()
    made = []
    for i in range(count):
        own = rng.integers(5, VOCAB_SIZE, [1, 3, 7, 15, 16, 17, 31, 32, 33, 40][i % 10]).tolist()
        made.append(request(f"r{i}", shared + own if i % 3 == 0 else own, logprobs=2, prompt_logprobs=None))
    return made


def assert_same(one: dict[str, Answer], other: dict[str, Answer], kernels: str) -> None:
    """The same tokens; of the native kernels every bit of the log probabilities too."""
    for name, answer in one.items():
        assert other[name].tokens == answer.tokens, name
        if kernels == "native":
            assert other[name].logprobs == answer.logprobs
        for a, b in zip(answer.logprobs, other[name].logprobs, strict=True):
            assert [token for token, _, _ in a] == [token for token, _, _ in b]
            assert [value for _, value, _ in a] == pytest.approx([value for _, value, _ in b], abs=1e-4)


@pytest.fixture(scope="module", params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not HAS_NATIVE:
        pytest.skip("the native kernels were not built")
    return str(request.param)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def executor(family: str, kernels: str, folder: Path) -> InprocExecutor:
    return start(folder / family, kernels=kernels)


@pytest.fixture(scope="module")
def alone(executor: InprocExecutor) -> dict[str, Answer]:
    """Each request by itself, its prompt in one piece."""
    answers = {}
    for entry in prompts():
        answers |= serve(executor, [entry], caching=False)[0]
    return answers


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_caching_change_nothing(
    executor: InprocExecutor, alone: dict[str, Answer], kernels: str, chunk: int, caching: bool
) -> None:
    answers, scheduler = serve(executor, prompts(), chunk=chunk, caching=caching)
    assert_same(alone, answers, kernels)
    again, _ = serve(executor, prompts(), scheduler=scheduler)
    assert_same(alone, again, kernels)


@pytest.mark.parametrize("seed", [0, 1])
def test_batch_and_order_change_nothing(
    executor: InprocExecutor, alone: dict[str, Answer], kernels: str, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(10)
    answers, _ = serve(executor, [prompts()[i] for i in order], max_num_seqs=2 + 3 * seed)
    assert_same(alone, answers, kernels)


def test_preemption_changes_nothing(folder: Path, family: str, executor: InprocExecutor, kernels: str) -> None:
    entries = [request(f"p{i}", range(10 + i, 20 + 2 * i), max_tokens=40, logprobs=1) for i in range(6)]
    roomy, _ = serve(executor, entries, caching=False)
    small = start(folder / family, kernels=kernels, num_gpu_blocks_override=8)
    answers, scheduler = serve(small, entries, caching=False)
    assert scheduler.stats().num_preemptions_total > 0
    assert_same(roomy, answers, kernels)


def test_seeded_requests_draw_the_same_alone_and_together(executor: InprocExecutor) -> None:
    entries = [
        request(f"s{i}", [7, 8, 9 + i], temperature=1.0, top_p=0.95, seed=i, frequency_penalty=0.2) for i in range(8)
    ]
    together, _ = serve(executor, entries)
    for entry in entries:
        assert serve(executor, [entry])[0][entry.request_id].tokens == together[entry.request_id].tokens
    assert len({tuple(answer.tokens) for answer in together.values()}) > 4


@pytest.mark.parametrize("chunk", [3, 64])
def test_prompt_logprobs_are_those_of_generation(executor: InprocExecutor, chunk: int) -> None:
    prompt = list(range(20, 53))  # one more than eight blocks
    first, scheduler = serve(executor, [request("a", prompt, logprobs=0, max_tokens=8)])
    whole = prompt + first["a"].tokens
    entry = request("b", whole, prompt_logprobs=0, logprobs=0, max_tokens=1)
    answers, _ = serve(executor, [entry], chunk=chunk)
    found = answers["b"].prompt_logprobs
    assert [candidates[0][0] for candidates in found] == whole[1:]
    generated = [candidates[0][1] for candidates in first["a"].logprobs]
    assert [candidates[0][1] for candidates in found[-8:]] == pytest.approx(generated, abs=1e-4)
    again, _ = serve(executor, [entry], scheduler=scheduler)  # the prefix is in this one's cache
    assert len(again["b"].prompt_logprobs) == len(found)


def test_a_poisoned_weight_fails_its_requests_not_the_engine(folder: Path) -> None:
    executor = start(folder / "llama")
    backend = executor._running.backend
    original = backend.forward

    def poisoned(inputs: StepInputs) -> Computed:
        computed = original(inputs)
        computed.rows[0, 0] = math.nan  # the first row's
        return computed

    backend.forward = poisoned  # type: ignore[method-assign]
    answers, _ = serve(executor, [request("bad", [5, 6, 7]), request("good", [5, 6])], caching=False)
    assert answers["bad"].finish_reason == "error"
    assert answers["bad"].error
    assert answers["good"].finish_reason == "error" or answers["good"].tokens


def test_the_plan_and_the_times_of_the_start_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagemill"):
        executor = start(folder / "llama")
    assert "Memory plan" in caplog.text
    assert "started in" in caplog.text
    assert set(executor.start_times_s) == {"find", "load", "plan", "allocate", "warm up"}
    assert executor.call("memory_plan").startswith("Memory plan")
    with pytest.raises(EngineError, match="no function 'nothing'"):
        executor.call("nothing")


def test_a_small_cache_lowers_the_context_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = start(folder / "llama", kv_cache_memory_bytes=100_000)
    assert executor.max_model_len < executor.model_config.max_position_embeddings
    assert f"lowered to {executor.max_model_len}" in caplog.text


def test_no_room_for_one_request_is_refused(folder: Path) -> None:
    with pytest.raises(MemoryPlanError, match="not enough memory for one request"):
        start(folder / "llama", kv_cache_memory_bytes=1000)


def test_a_length_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len=100000"):
        start(folder / "llama", max_model_len=100_000)


def test_nothing_runs_after_a_shutdown(folder: Path) -> None:
    executor = start(folder / "llama")
    executor.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        serve(executor, [request("a", [5])])
