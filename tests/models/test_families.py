"""What configurations mean, in old and new spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, ModelFormatError, UnsupportedModelError
from pagemill.layers.rotary import longest_context
from pagemill.model_config import ModelConfig
from pagemill.models.checkpoint import open_checkpoint
from pagemill.models.families import FAMILIES, model_config
from pagemill.models.hf_config import from_config_json
from pagemill.models.loader import load_model
from pagemill.models.sources import resolve_source
from tests.models.tiny import BASE, tiny_llama

LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"]}


def read(family: str, **changes: Any) -> ModelConfig:
    return from_config_json(FAMILIES[family], {**BASE, **changes}, {})


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("word", ["type", "rope_type"])
def test_rope_scaling_is_read_under_every_spelling(key: str, word: str) -> None:
    config = read("qwen2", rope_theta=1e6, **{key: {word: "yarn", **YARN}})
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.scaling, rope.factor, rope.original_max_position, rope.theta) == ("yarn", 4.0, 16, 1e6)


def test_a_length_that_is_scaled_already_is_not_scaled_again() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    assert read("llama", rope_scaling=linear).max_position_embeddings == 128
    assert read("llama", rope_scaling={"rope_type": "yarn", **YARN}).max_position_embeddings == 128
    assert read("llama", rope_scaling={"rope_type": "yarn", **YARN, "factor": 16.0}).max_position_embeddings == 256


def test_only_rules_that_stretch_on_demand_go_past_the_model_s_own_length() -> None:
    assert longest_context(read("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})) == 256
    assert longest_context(read("llama", rope_scaling={"rope_type": "yarn", **YARN})) == 128


def test_gemma3_layers_have_two_kinds_of_rope_in_old_and_new_spelling() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    shape = {"num_hidden_layers": 12, "sliding_window": 8, "head_dim": 16}
    assert read("gemma3", **shape, **old) == read("gemma3", **shape, **new)
    layers = read("gemma3", **shape, **old).layers
    assert [layer.window for layer in layers] == [8, 8, 8, 8, 8, None] * 2
    assert [(layer.rope.theta, layer.rope.scaling) for layer in layers if layer.rope][4:6] == [
        (1e4, "default"),
        (1e6, "linear"),
    ]


def test_an_explicit_null_switches_a_family_s_default_off() -> None:
    assert read("mistral").layers[0].window is None  # 4096 covers all of 128 positions
    assert read("mistral", max_position_embeddings=8192).layers[0].window == 4096
    assert read("mistral", max_position_embeddings=8192, sliding_window=None).layers[0].window is None
    assert read("gemma2", attn_logit_softcapping=None).attention_softcap is None


def test_end_of_text_ids_of_config_and_generation_config_are_united() -> None:
    config = from_config_json(FAMILIES["llama"], {**BASE, "eos_token_id": 2}, {"eos_token_id": [7, 2, 9]})
    assert config.eos_token_ids == (7, 2, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM' is not supported; supported are .*Llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported are silu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope scaling 'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "'mrope_section' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_features_that_would_change_results_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tiny_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters")
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedModelError, match=message):
        model_config(open_checkpoint(resolve_source(str(path))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "does not say 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size='64' must be a whole number"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be greater than 0"),
        ({"head_dim": 15}, "rotary dimension 15 must be even"),
        ({"rope_scaling": {"rope_type": "linear"}}, "does not say 'factor'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope needs long_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ({"architectures": None}, "has no 'architectures'"),
    ],
)
def test_values_that_make_no_sense_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    config.pop("rope_parameters")
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelFormatError, match=message):
        model_config(open_checkpoint(resolve_source(str(path))))


def test_a_context_past_the_rope_table_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m")
    checkpoint = open_checkpoint(resolve_source(str(path)))
    with pytest.raises(ConfigError, match="--max-model-len=129 is longer than the model's 128 positions"):
        load_model(checkpoint, EngineConfig(max_model_len=129), native=False)
    decoder = load_model(checkpoint, EngineConfig(max_model_len=50), native=False)
    assert decoder.attention_specs[0].rope_table is not None
    assert decoder.attention_specs[0].rope_table.shape == (50, 2, 8)
    assert decoder.attention_specs[0].rope_table.dtype == torch.float32
