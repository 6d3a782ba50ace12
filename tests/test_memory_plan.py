"""The division of memory is arithmetic: these tests check the numbers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, MemoryPlanError
from pagemill.memory_plan import MemoryPlan, activation_bytes, kv_specs, plan_memory
from pagemill.model_config import LayerConfig, ModelConfig, PoolingConfig
from pagemill.platform import MemoryInfo

GIB = 1 << 30
LAYER_TOKEN_BYTES = 2 * 2 * 16 * 2  # keys and values of 2 heads of 16 numbers of 2 bytes


def model(windows: tuple[int | None, ...] = (None,) * 4, max_len: int = 8192) -> ModelConfig:
    return ModelConfig(
        architecture="test",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=tuple(LayerConfig(window=window, rope=None) for window in windows),
        max_position_embeddings=max_len,
        norm_eps=1e-5,
        attention_scale=0.25,
    )


def encoder(max_len: int = 512) -> ModelConfig:
    return dataclasses.replace(model(max_len=max_len), causal=False, pooling=PoolingConfig(kind="mean"))


def test_an_encoder_needs_the_memory_of_one_layer_and_of_its_vectors() -> None:
    config = EngineConfig(max_num_batched_tokens=1024, max_num_seqs=8)
    (spec,) = plan(config, encoder()).specs
    assert (spec.bytes_per_block, len(spec.layers)) == (LAYER_TOKEN_BYTES * config.block_size, 4)
    assert plan(config, encoder()).logits_bytes == 4 * 64 * 1024
    one_each = dataclasses.replace(encoder(), pooling=PoolingConfig(kind="cls"))
    assert plan(config, one_each).logits_bytes == 4 * 64 * 8
    assert "vectors, no logits" in plan(config, one_each).render()


def test_an_encoder_s_context_is_at_most_a_step_and_as_trained() -> None:
    small = plan(EngineConfig(max_num_batched_tokens=100), encoder())
    assert small.max_model_len == 100
    assert "--max-num-batched-tokens=100" in small.notes[0]
    trained = dataclasses.replace(encoder(), usual_context=256)
    assert plan(EngineConfig(), trained).max_model_len == 256
    assert plan(EngineConfig(max_model_len=400), trained).max_model_len == 400


def plan(
    config: EngineConfig,
    shape: ModelConfig,
    *,
    total: int = 8 * GIB,
    available: int | None = None,
    weights: int = GIB,
    share: float = 1.0,
) -> MemoryPlan:
    return plan_memory(
        config,
        shape,
        memory=MemoryInfo(total, total if available is None else available),
        weight_bytes=weights,
        activation_bytes=activation_bytes(shape, config.max_num_batched_tokens),
        specs=kv_specs(shape, config.block_size, LAYER_TOKEN_BYTES * config.block_size),
        kv_share=share,
    )


def blocks(made: MemoryPlan) -> list[int]:
    return [spec.num_blocks for spec in made.specs]


def test_with_plenty_of_memory_every_request_may_be_full_length_and_no_more_is_taken() -> None:
    made = plan(EngineConfig(max_num_seqs=4), model())
    assert made.max_model_len == 8192
    assert blocks(made) == [4 * 8192 // 16]
    assert made.max_concurrency == 4.0
    assert made.kv_bytes == 4 * 8192 * 4 * 2 * 2 * 16 * 2
    assert not made.notes


def test_what_other_processes_hold_is_not_planned_with() -> None:
    free = plan(EngineConfig(max_num_seqs=4096), model(), total=8 * GIB)
    busy = plan(EngineConfig(max_num_seqs=4096), model(), total=8 * GIB, available=3 * GIB)
    assert busy.kv_bytes < free.kv_bytes
    assert busy.kv_bytes + busy.weight_bytes <= 3 * GIB


def test_the_budget_is_never_passed() -> None:
    made = plan(EngineConfig(max_num_seqs=4096, gpu_memory_utilization=0.5), model())
    used = made.kv_bytes + made.weight_bytes + made.activation_bytes + made.logits_bytes + made.runtime_bytes
    assert used <= made.budget_bytes == 4 * GIB


def test_the_default_is_a_share_of_a_machine_that_others_use_too() -> None:
    made = plan(EngineConfig(max_num_seqs=4096), model(), share=0.25)
    assert made.kv_bytes <= 2 * GIB
    assert "--kv-cache-memory-bytes" in made.kv_source


def test_one_request_of_full_length_may_take_more_than_the_share() -> None:
    shape = model((None,) * 64, max_len=131_072)
    made = plan(EngineConfig(), shape, share=0.05)
    assert made.max_model_len == 131_072


def test_a_length_that_does_not_fit_is_lowered_and_said() -> None:
    made = plan(EngineConfig(), model(max_len=1 << 20), total=2 * GIB, weights=GIB + (GIB >> 1))
    assert MIN <= made.max_model_len < 1 << 20
    assert f"{made.max_model_len:,}" in made.notes[0]
    assert f"{made.max_model_len:,}" in made.render()


MIN = 64


def test_an_explicit_length_that_does_not_fit_is_lowered_too() -> None:
    made = plan(EngineConfig(max_model_len=8000, kv_cache_memory_bytes=4 * 256 * 16 * 10), model())
    assert made.max_model_len == made.specs[0].num_blocks * 16 < 8000
    assert "--max-model-len" in made.notes[0]


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len=9000.*8192"):
        plan(EngineConfig(max_model_len=9000), model())


def test_a_model_that_can_go_further_than_its_usual_length_may() -> None:
    shape = model()
    made = plan_memory(
        EngineConfig(max_model_len=9000),
        shape,
        memory=MemoryInfo(8 * GIB, 8 * GIB),
        weight_bytes=GIB,
        activation_bytes=0,
        specs=kv_specs(shape, 16, LAYER_TOKEN_BYTES * 16),
        max_positions=16_384,
    )
    assert made.max_model_len == 9000


def test_too_little_memory_for_any_request_says_the_numbers() -> None:
    with pytest.raises(MemoryPlanError, match=r"one request of 64 tokens.*GiB"):
        plan(EngineConfig(), model(), total=GIB, weights=GIB)


def test_kv_bytes_as_asked_for() -> None:
    made = plan(EngineConfig(kv_cache_memory_bytes=100 << 20), model())
    block = made.specs[0].bytes_per_block
    assert made.kv_bytes == (100 << 20) // block * block


def test_block_override_is_exact_even_where_it_is_tiny() -> None:
    made = plan(EngineConfig(num_gpu_blocks_override=3, block_size=4), model())
    assert blocks(made) == [3]
    assert made.max_model_len == 12


def test_layers_with_windows_get_fewer_blocks() -> None:
    shape = model((None, 512, None, 512))
    config = EngineConfig(max_num_batched_tokens=512, kv_cache_memory_bytes=256 << 20)
    made = plan(config, shape)
    assert [spec.layers for spec in made.specs] == [(0, 2), (1, 3)]
    assert made.specs[1].num_blocks < made.specs[0].num_blocks


def test_a_model_of_windows_alone_has_one_group() -> None:
    assert [spec.window for spec in kv_specs(model((512, 512)), 16, 64)] == [512]


def test_the_rendering_names_every_term() -> None:
    text = plan(EngineConfig(), model()).render()
    for term in ("weights", "activations", "logits", "KV cache", "blocks", "context", "at once"):
        assert term in text


@given(
    kv_bytes=st.integers(1 << 14, 1 << 32),
    block_size=st.sampled_from([1, 4, 16, 32]),
    windows=st.lists(st.sampled_from([None, 64, 512]), min_size=1, max_size=6),
    chunk=st.integers(1, 4096),
)
def test_the_promised_length_always_fits(kv_bytes: int, block_size: int, windows: list[int | None], chunk: int) -> None:
    config = EngineConfig(kv_cache_memory_bytes=kv_bytes, block_size=block_size, max_num_batched_tokens=chunk)
    try:
        made = plan(config, model(tuple(windows)))
    except MemoryPlanError:
        return
    assert made.kv_bytes <= kv_bytes
    assert made.max_concurrency >= 1.0
    for spec in made.specs:
        assert spec.num_blocks >= spec.max_blocks(made.max_model_len, chunk)
