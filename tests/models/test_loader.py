"""Weights reach their place, or the tensor that does not is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, ModelFormatError
from pagemill.layers.parallel import SoloGroup
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.decoder import Decoder
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from tests.models.paged import logits_of
from tests.models.tiny import tiny_checkpoint, tiny_llama


def load(path: Path, group: SoloGroup | None = None) -> Decoder:
    checkpoint = open_checkpoint(resolve_source(str(path)))
    return load_model(checkpoint, EngineConfig(), native=False, group=group or SoloGroup())


def edit(path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Put tensors into the checkpoint, or take them out."""
    tensors = load_file(path / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            r"'model.layers.1.mlp.up_proj.weight' of shape \[96, 64\] is mis",
        ),
        ({"model.norm.weight": torch.ones(63)}, r"'model.norm.weight' has shape \[63\]; expected \[64\]"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "have no place .*q_proj.bias"),
        ({"lm_head.weight": None}, r"'lm_head.weight' of shape \[320, 64\] is missing"),
    ],
    ids=["missing", "wrong shape", "extra", "untied head"],
)
def test_a_tensor_that_does_not_fit_is_named(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(edit(tiny_llama(tmp_path / "m"), change))


def test_a_tied_head_shares_the_embedding_even_if_the_file_repeats_it(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama3", tmp_path / "m")
    plain = load(path)
    assert plain.head is plain.embedding
    repeated = load(edit(path, {"lm_head.weight": load_file(path / "model.safetensors")["model.embed_tokens.weight"]}))
    assert repeated.head is repeated.embedding
    assert repeated.weight_bytes == plain.weight_bytes
    ids = list(range(5, 25))
    assert torch.equal(logits_of(plain, ids), logits_of(repeated, ids))


def test_tensors_that_repeat_the_configuration_are_passed_over(tmp_path: Path) -> None:
    load(edit(tiny_llama(tmp_path / "m"), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    whole, cut = tiny_llama(tmp_path / "whole"), tiny_llama(tmp_path / "cut", max_shard_size="100KB")
    assert len(list(cut.glob("*.safetensors"))) > 1
    ids = list(range(5, 25))
    assert torch.equal(logits_of(load(whole), ids), logits_of(load(cut), ids))


@pytest.mark.parametrize("family", ["llama_bias", "phi3"])
def test_ranks_hold_equal_parts_that_make_up_the_whole(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path / "m")
    whole = load(path).layers[0]
    ranks = [load(path, SoloGroup(rank, 2)).layers[0] for rank in range(2)]
    heads, inner = whole.attention.spec.head_dim, whole.mlp.gate_up.out_features // 2
    for room, role, heights in [
        ("attention", "qkv", [4 * heads, 2 * heads, 2 * heads]),
        ("mlp", "gate_up", [inner, inner]),
    ]:
        halves = [getattr(getattr(rank, room), role).dequantize().split([h // 2 for h in heights]) for rank in ranks]
        joined = torch.cat([piece for pair in zip(*halves, strict=True) for piece in pair])
        assert torch.equal(joined, getattr(getattr(whole, room), role).dequantize())
    for name in ("attention.o", "mlp.down"):
        room, role = name.split(".")
        columns = [getattr(getattr(rank, room), role).dequantize() for rank in ranks]
        assert torch.equal(torch.cat(columns, dim=1), getattr(getattr(whole, room), role).dequantize())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_checkpoint_is_read(prefix: str, tmp_path: Path) -> None:
    plain = tiny_checkpoint("gemma3", tmp_path / "text")
    whole = tiny_checkpoint("gemma3", tmp_path / "whole")
    text = json.loads((plain / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [2, 7]}
    (whole / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", prefix, 1): tensor for name, tensor in load_file(plain / "model.safetensors").items()
    }
    tensors["vision_tower.patches.weight"] = torch.zeros(3)
    save_file(tensors, whole / "model.safetensors")
    got = load(whole)
    assert got.config.eos_token_ids == (2, 7)
    assert torch.equal(logits_of(got, list(range(5, 25))), logits_of(load(plain), list(range(5, 25))))


def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be divided by 3 ranks"):
        load(tiny_llama(tmp_path / "m"), SoloGroup(0, 3))


MEASURE = """
import json, resource, sys, threading
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

import torch
from pagemill.config import EngineConfig
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source

torch.set_num_threads(1)
torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
source = resolve_source(sys.argv[1])
checkpoint = open_checkpoint(source)
before, peak, done = resident(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, resident())

thread = threading.Thread(target=watch)
thread.start()
decoder = load_model(checkpoint, EngineConfig(), native=sys.argv[2] == "native")
done.set()
thread.join()
print(json.dumps({"peak": peak - before, "file": checkpoint.nbytes, "weights": decoder.weight_bytes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_loading_holds_little_more_than_the_file(kernels: str, tmp_path: Path) -> None:
    if kernels == "native":
        pytest.importorskip("pagemill._native", reason="the native library is not built")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
    path = tiny_checkpoint("llama", tmp_path / "m", dtype=torch.bfloat16, **shape)
    for model in (str(path), "smollm2-135m-instruct"):
        command = [sys.executable, "-c", MEASURE, model, kernels]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        assert found["peak"] < 1.25 * found["file"], model
