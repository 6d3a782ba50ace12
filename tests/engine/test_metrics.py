"""The figures of /metrics: vLLM's names and types, there before traffic, right after it, true at once."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill.engine.metrics import Histogram, Metrics
from pagemill.engine.wire import StepStats
from pagemill.params import FinishReason
from tests.engine.fakes import scripted
from tests.engine.harness import Engine

COUNTERS = {
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:prompt_tokens",
    "vllm:generation_tokens", "vllm:request_success", "pagemill:engine_restarts", "pagemill:engine_steps",
}  # fmt: skip
GAUGES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "pagemill:kv_slot_utilization",
}  # fmt: skip
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens", "vllm:request_params_n", "vllm:request_params_max_tokens",
    "vllm:iteration_tokens_total",
}  # fmt: skip


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name -> value, summed over finish reasons and buckets."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_every_metric_is_there_before_the_first_request() -> None:
    metrics = Metrics(model_name="m", max_model_len=100)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render())}
    assert {name for name, family in families.items() if family.type == "counter"} == COUNTERS
    assert {name for name, family in families.items() if family.type == "gauge"} == GAUGES
    assert {name for name, family in families.items() if family.type == "histogram"} == HISTOGRAMS
    values = {sample.value for name, family in families.items() for sample in family.samples if name in COUNTERS}
    assert values == {0.0}
    reasons = {sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    assert all(sample.labels["model_name"] == "m" for family in families.values() for sample in family.samples)


def test_totals_agree_with_what_was_served() -> None:
    engine = Engine()
    states = [engine.ask([7, 8, 9 + index, 4], max_tokens=5) for index in range(3)]
    engine.finish()
    assert all(state.finished for state in states)
    found = samples(engine.metrics)
    assert found["vllm:prompt_tokens_total"] == 12
    assert found["vllm:generation_tokens_total"] == 15
    assert found["vllm:request_success_total"] == 3
    for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_params_n"):
        assert found[f"{name}_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 12
    assert found["vllm:time_per_output_token_seconds_count"] == 12
    assert found["vllm:request_prompt_tokens_sum"] == 12
    assert found["vllm:request_generation_tokens_sum"] == 15
    assert found["vllm:iteration_tokens_total_sum"] == 12 + 12
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert 0 < found["pagemill:kv_slot_utilization"] <= 1


def test_times_of_a_request_add_up() -> None:
    engine = Engine(max_num_seqs=1)
    engine.ask([7, 4], max_tokens=3)
    engine.ask([8, 4], max_tokens=3)
    engine.finish()
    metrics = engine.metrics
    parts = metrics.queued_s.total + metrics.prefill_s.total + metrics.decode_s.total
    assert parts == pytest.approx(metrics.e2e_s.total)
    assert metrics.inference_s.total == pytest.approx(metrics.prefill_s.total + metrics.decode_s.total)


def test_waiting_requests_show_before_the_engine_has_seen_them() -> None:
    engine = Engine()
    engine.ask([7, 4])
    assert samples(engine.metrics)["vllm:num_requests_waiting"] == 1


def test_aborted_and_stopped_requests_are_counted_with_their_reason() -> None:
    engine = Engine(scripted([5] * 20))
    stopped = engine.ask([4], max_tokens=10, stop=engine.tokenizer.decode([5]) * 3)
    aborted = engine.ask([9, 4], max_tokens=10)
    engine.step()
    engine.abort(aborted)
    engine.finish()
    assert stopped.finished
    assert engine.metrics.finished(FinishReason.STOP) == engine.metrics.finished(FinishReason.ABORT) == 1
    found = samples(engine.metrics)
    assert found["vllm:request_success_total"] == found["vllm:e2e_request_latency_seconds_count"] == 2


def test_prefix_hits_are_counted_in_tokens() -> None:
    engine = Engine()
    for _ in range(2):
        engine.ask([7] * 12, max_tokens=2)
        engine.finish()
    assert engine.metrics.prefix_queries == 24
    assert engine.metrics.prefix_hits == 8


def test_counters_go_on_after_the_engine_was_restarted() -> None:
    metrics = Metrics(model_name="m", max_model_len=100)
    metrics.observe_step(StepStats(num_preemptions=3, prefix_queries=10, num_running=2), 0)
    metrics.engine_died()
    assert metrics.last.num_running == 0
    metrics.engine_started(block_size=16, num_blocks=8)
    metrics.observe_step(StepStats(num_preemptions=1, prefix_queries=5), 0)
    assert metrics.preemptions == 4
    assert metrics.prefix_queries == 15


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram("h", "", (1, 5))
    histogram.observe(1)
    histogram.observe(1.5, times=3)
    histogram.observe(9)
    assert histogram.buckets() == [("1.0", 1.0), ("5.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.5
    assert histogram.count == 5
