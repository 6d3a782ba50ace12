"""Vectors: equal to transformers' and, on the native kernels, the same bytes whatever else is computed beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineRequest
from pagemill.core.scheduler import Scheduler
from pagemill.params import FinishReason
from pagemill.worker.executor import InprocExecutor
from tests.models.tiny import VOCAB_SIZE, tiny_checkpoint
from tests.models.tiny_bert import VOCABULARY, tiny_bert, tiny_cross_encoder
from tests.worker.serving import Answer, pooled, serve

NUM_REQUESTS = 24
ENCODER_WAYS = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "max_num_batched_tokens": 97},
    {"max_num_seqs": 24, "max_num_batched_tokens": 512},
]
DECODER_WAYS = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "chunk": 1},
    {"max_num_seqs": 24, "chunk": 7, "max_num_batched_tokens": 33},
    {"max_num_seqs": 24, "max_num_batched_tokens": 512},
]
TOLERANCE = 1e-4
"""Largest difference from transformers of a hidden state; they are a few units wide."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")
    makers = {
        "bert": tiny_bert,
        "cross": tiny_cross_encoder,
        "qwen3": lambda path: tiny_checkpoint("qwen3", path, num_hidden_layers=2),
    }

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else makers[name](root / name)

    return make


def start(folder: Path, **config: Any) -> InprocExecutor:
    options = {"num_threads": 2, "kv_cache_memory_bytes": 8 << 20, "runner": "pooling", "dtype": "float32", **config}
    return InprocExecutor.create(
        EngineConfig(model=str(folder), max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=512, **options)
    )


def requests(vocab_size: int, most: int, **options: Any) -> list[EngineRequest]:
    """Of many lengths, half of them with a prefix in common."""
    rng = np.random.default_rng(3)
    common = rng.integers(5, vocab_size, 40).tolist()
    made = []
    for i in range(NUM_REQUESTS):
        own = rng.integers(5, vocab_size, int(rng.integers(1, most - 40))).tolist()
        made.append(pooled(f"r{i}", common[: i % 41] + own, **options))
    return made


def vectors(answers: dict[str, Answer]) -> dict[str, np.ndarray]:
    assert all(answer.finish_reason is FinishReason.STOP and not answer.tokens for answer in answers.values())
    return {name: np.frombuffer(answer.vector or b"", "<f4") for name, answer in answers.items()}


def hidden_states(folder: Path, ids: Sequence[int], kind: str = "AutoModel") -> torch.Tensor:
    import transformers

    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).last_hidden_state[0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("kind", ["CLS", "MEAN", "LAST"])
@pytest.mark.parametrize("model", ["bert", "qwen3"])
def test_each_kind_of_pooling_equals_transformers(
    folder_of: Callable[[str], Path], model: str, kind: str, kernels: str
) -> None:
    if kernels == "native":
        pytest.importorskip("pagemill._native")
    folder = folder_of(model)
    executor = start(folder, kernels=kernels, pooler_config=f'{{"pooling_type": "{kind}"}}')
    size = len(VOCABULARY) if model == "bert" else VOCAB_SIZE
    asked = requests(size, 90, last=kind == "LAST")[:6]
    got = vectors(serve(executor, asked, max_num_batched_tokens=100)[0])
    for request in asked:
        states = hidden_states(folder, request.prompt_token_ids)
        expected = {"CLS": states[0], "MEAN": states.mean(0), "LAST": states[-1]}[kind]
        assert np.abs(got[request.request_id] - expected.numpy()).max() < TOLERANCE


@pytest.mark.filterwarnings("default")
def test_a_pair_s_score_equals_transformers(folder_of: Callable[[str], Path]) -> None:
    import transformers

    folder = folder_of("cross")
    reference = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    ids = torch.randint(5, len(VOCABULARY), (30,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [pooled("plain", ids), pooled("pair", ids, second_segment=12), pooled("other", ids, second_segment=29)]
    got = vectors(serve(start(folder), asked)[0])
    for name, second in (("plain", 30), ("pair", 12), ("other", 29)):
        types = [int(i >= second) for i in range(30)]
        with torch.inference_mode():
            expected = reference(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
        assert got[name].shape == (1,)
        assert abs(float(got[name][0] - expected[0])) < TOLERANCE
    assert len({float(value[0]) for value in got.values()}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["CLS", "MEAN"])
def test_nothing_but_the_input_decides_an_encoder_s_bytes(
    folder_of: Callable[[str], Path], kind: str, dtype: str
) -> None:
    pytest.importorskip("pagemill._native")
    executor = start(folder_of("bert"), dtype=dtype, pooler_config=f'{{"pooling_type": "{kind}"}}')
    asked = requests(len(VOCABULARY), 96)
    check_ways(executor, asked, ENCODER_WAYS)
    single = start(folder_of("bert"), dtype=dtype, num_threads=1, pooler_config=f'{{"pooling_type": "{kind}"}}')
    assert answered(single, asked, ENCODER_WAYS[2]) == answered(executor, asked, ENCODER_WAYS[0])


@pytest.mark.parametrize("kind", ["LAST", "MEAN", "CLS"])
def test_nothing_but_the_input_decides_a_decoder_s_bytes(folder_of: Callable[[str], Path], kind: str) -> None:
    pytest.importorskip("pagemill._native")
    executor = start(folder_of("qwen3"), pooler_config=f'{{"pooling_type": "{kind}"}}')
    asked = requests(VOCAB_SIZE, 110, last=kind == "LAST")
    check_ways(executor, asked, DECODER_WAYS)


def answered(executor: InprocExecutor, asked: list[EngineRequest], way: dict[str, Any]) -> dict[str, bytes | None]:
    return {name: answer.vector for name, answer in serve(executor, asked, **way)[0].items()}


def check_ways(executor: InprocExecutor, asked: list[EngineRequest], ways: list[dict[str, Any]]) -> None:
    alone = answered(executor, asked, ways[0])
    assert len(set(alone.values())) > 1
    for seed, way in enumerate(ways[1:]):
        order = np.random.default_rng(seed).permutation(len(asked))
        assert answered(executor, [asked[i] for i in order], way) == alone, way


def test_a_mean_begins_anew_after_preemption(folder_of: Callable[[str], Path]) -> None:
    executor = start(folder_of("qwen3"), pooler_config='{"pooling_type": "MEAN"}')
    asked = pooled("long", range(5, 105))
    alone = answered(executor, [asked], {})["long"]
    scheduler = Scheduler(
        executor.kv_specs, max_num_seqs=1, max_num_batched_tokens=32, max_model_len=128, policy="priority"
    )
    scheduler.add(msgspec.structs.replace(asked, priority=1))
    found = {}
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        result = executor.sample(plan, None, executor.execute(plan))
        found |= {output.request_id: output.pooled for output in scheduler.update(plan, result, 0.0)}
        if plan.step == 2:
            scheduler.add(pooled("urgent", range(5, 25)))
    assert scheduler.stats().num_preemptions_total == 1
    assert found["long"] == alone


def test_a_last_token_takes_its_prefix_from_the_cache_and_a_mean_does_not(folder_of: Callable[[str], Path]) -> None:
    ids = list(range(5, 85))
    cached = {}
    for kind, last in (("LAST", True), ("MEAN", False)):
        executor = start(folder_of("qwen3"), pooler_config=f'{{"pooling_type": "{kind}"}}')
        first, scheduler = serve(executor, [pooled("a", ids, last=last)])
        again, _ = serve(executor, [pooled("a", ids, last=last)], scheduler=scheduler)
        assert first["a"].vector == again["a"].vector
        cached[kind] = again["a"].num_cached_tokens
    assert cached == {"LAST": 64, "MEAN": 0}


def test_an_encoder_s_inputs_share_a_step_and_are_never_cut(folder_of: Callable[[str], Path]) -> None:
    executor = start(folder_of("bert"))
    scheduler = Scheduler(
        executor.kv_specs,
        max_num_seqs=8,
        max_num_batched_tokens=100,
        max_model_len=96,
        enable_prefix_caching=False,
        whole_prompts=True,
    )
    for name, length in (("a", 40), ("b", 40), ("c", 40), ("d", 10)):
        scheduler.add(pooled(name, [7] * length))
    steps = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        steps.append(dict(zip(plan.request_ids, plan.num_new_tokens, strict=True)))
        scheduler.update(plan, executor.sample(plan, None, executor.execute(plan)), 0.0)
        scheduler.check_invariants()
    assert steps == [{"a": 40, "b": 40}, {"c": 40, "d": 10}]


def test_all_layers_of_an_encoder_share_one_cache(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    (three,) = start(folder_of("bert")).kv_specs
    (one,) = start(tiny_bert(tmp_path / "shallow", num_hidden_layers=1)).kv_specs
    assert (one.layers, three.layers) == ((0,), (0, 1, 2))
    assert one.bytes_per_block == three.bytes_per_block


def test_only_the_input_that_overflows_fails(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "overflowing"
    path.mkdir()
    for file in folder_of("bert").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = load_file(path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][9] = 3e38
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    for kind in ("CLS", "MEAN"):
        executor = start(path, pooler_config=f'{{"pooling_type": "{kind}"}}')
        answers, _ = serve(executor, [pooled("bad", [6, 9, 9, 7]), pooled("good", [6, 7, 8])])
        assert answers["bad"].finish_reason is FinishReason.ERROR
        assert "NaN or infinite values" in (answers["bad"].error or "")
        assert answers["bad"].vector is None
        assert np.isfinite(np.frombuffer(answers["good"].vector or b"", "<f4")).all()
