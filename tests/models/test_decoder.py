"""Every family against transformers in float32, over pages, across block, window and rope-scaling borders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.config import EngineConfig
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.decoder import Decoder
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from tests.models.paged import PagedRun, greedy, logits_of
from tests.models.tiny import FAMILIES, ORIGINAL_MAX_POSITION, VOCAB_SIZE, WINDOW, tiny_checkpoint

TOLERANCE = 1e-4
"""Largest difference of a logit; logits are a few units wide."""
MAX_LEN = 128


def load(path: Path, **options: Any) -> Decoder:
    checkpoint = open_checkpoint(resolve_source(str(path)))
    decoder = load_model(checkpoint, EngineConfig(model=str(path), **options), native=False)
    checkpoint.close()
    return decoder


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(5, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("tiny")

    def make(family: str) -> Path:
        path = folder / family
        return path if path.exists() else tiny_checkpoint(family, path)

    return make


def reference(path: Path, **options: Any) -> Any:
    import transformers

    options = {"attn_implementation": "eager", "dtype": torch.float32, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_at_block_window_and_scaling_borders(
    family: str, checkpoint_of: Callable[[str], Path]
) -> None:
    path = checkpoint_of(family)
    model = reference(path)
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, ORIGINAL_MAX_POSITION, ORIGINAL_MAX_POSITION + 1, 40):
        # longrope takes its factors by the longest context, as transformers by the present one
        longest = ORIGINAL_MAX_POSITION if length <= ORIGINAL_MAX_POSITION else MAX_LEN
        decoder = load(path, max_model_len=longest)
        ids = prompt(length)
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0]
        for chunk in (None, 5):
            torch.testing.assert_close(logits_of(decoder, ids, chunk), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    path = checkpoint_of(family)
    ids, count = prompt(ORIGINAL_MAX_POSITION + 1, seed=2), 24
    with torch.inference_mode():
        out = reference(path).generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert greedy(load(path), ids, count) == out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_a_row_does_not_see_its_neighbours(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    decoder = load(checkpoint_of(family))
    prompts = [prompt(length, seed=length) for length in (3, 17, 30)]
    run = PagedRun(decoder, rows=3)
    run.step({0: prompts[0], 1: prompts[1][:9]})
    mixed = run.step({2: prompts[2], 1: prompts[1][9:], 0: [7]})
    alone = [
        logits_of(decoder, prompts[2]),
        logits_of(decoder, prompts[1])[9:],
        logits_of(decoder, [*prompts[0], 7])[3:],
    ]
    torch.testing.assert_close(mixed, torch.cat(alone), atol=TOLERANCE, rtol=0)


def test_kinds_of_layers_are_numbered_full_attention_first(checkpoint_of: Callable[[str], Path]) -> None:
    groups = {family: load(checkpoint_of(family)).attention_specs for family in ("llama", "mistral", "gemma3")}
    assert {(spec.group, spec.window) for spec in groups["llama"]} == {(0, None)}
    assert {(spec.group, spec.window) for spec in groups["mistral"]} == {(0, WINDOW)}
    assert {(spec.group, spec.window) for spec in groups["gemma3"]} == {(0, None), (1, WINDOW)}


def test_the_file_s_type_is_kept_unless_another_is_named(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path / "m", dtype=torch.bfloat16)
    kept, widened = load(path), load(path, dtype="float32")
    assert kept.dtype == torch.bfloat16
    assert widened.dtype == torch.float32
    assert kept.embedding.nbytes * 2 == widened.embedding.nbytes
    with torch.inference_mode():
        expected = reference(path, dtype=torch.float32)(torch.tensor([prompt(20)])).logits[0]
    torch.testing.assert_close(logits_of(widened, prompt(20)), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits_of(kept, prompt(20)), expected, atol=0.3, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_prompts_past_a_real_window_equal_transformers(tmp_path: Path) -> None:
    path = tiny_checkpoint("mistral", tmp_path / "m", sliding_window=4096, max_position_embeddings=16384)
    decoder, model = load(path), reference(path, attn_implementation="sdpa")
    for length in (4095, 4096, 4097, 8192):
        ids = prompt(length)
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), logits_to_keep=64).logits[0]
        got = logits_of(decoder, ids, chunk=2048, block_size=16, max_len=length)[-64:]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
