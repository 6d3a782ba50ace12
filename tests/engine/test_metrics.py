"""The figures of /metrics: vLLM's names and types, there before traffic, right after it, true at once."""

from __future__ import annotations

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pagemill.config import EngineConfig
from pagemill.core.messages import EngineOutput, EngineRequest
from pagemill.engine.core import NoGrammars
from pagemill.engine.metrics import LONGEST_RETRY_S, Histogram, Metrics, Rate
from pagemill.engine.wire import StepOutputs, StepStats
from pagemill.params import FinishReason, StructuredOutputsParams
from tests.engine import vllm_metrics
from tests.engine.fakes import scripted
from tests.engine.harness import Engine

OWN = {
    "pagemill:engine_restarts": "counter",
    "pagemill:engine_steps": "counter",
    "pagemill:kv_slot_utilization": "gauge",
}


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name -> value, summed over finish reasons and buckets."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render())}


def test_every_metric_of_vllm_is_there_by_name_and_type_before_the_first_request() -> None:
    found = families(Metrics(model_name="m", max_model_len=8192))
    table = {
        **dict.fromkeys(vllm_metrics.GAUGES, "gauge"),
        **dict.fromkeys(vllm_metrics.COUNTERS, "counter"),
        **dict.fromkeys(vllm_metrics.HISTOGRAMS, "histogram"),
        **OWN,
    }
    assert {name: family.type for name, family in found.items()} == table
    unset = set(found) - {"vllm:cache_config_info"}
    assert {sample.value for name in unset for sample in found[name].samples} == {0.0}


def test_labels_are_those_of_vllm_and_every_value_of_them_is_there_at_0() -> None:
    found = families(Metrics(model_name="m", max_model_len=8192))
    for name, labels in (vllm_metrics.GAUGES | vllm_metrics.COUNTERS).items():
        common = {"model_name"} if name in vllm_metrics.WITHOUT_ENGINE else {"model_name", "engine"}
        for sample in found[name].samples:
            assert set(sample.labels) == common | set(labels), name
            assert sample.labels["model_name"] == "m"
        for label, values in labels.items():
            if values:
                assert {sample.labels[label] for sample in found[name].samples} == values, name
    for name in vllm_metrics.HISTOGRAMS:
        assert {*found[name].samples[0].labels} == {"model_name", "engine", "le"}, name


def test_buckets_are_those_of_vllm() -> None:
    found = families(Metrics(model_name="m", max_model_len=8192))
    for name, bounds in vllm_metrics.HISTOGRAMS.items():
        told = [float(sample.labels["le"]) for sample in found[name].samples if "le" in sample.labels]
        assert told == [*bounds, float("inf")], name


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


def by_label(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in families(metrics)[name].samples}


def test_prompt_tokens_are_told_apart_by_where_they_came_from() -> None:
    engine = Engine()
    for _ in range(2):
        engine.ask([7] * 12, max_tokens=2)
        engine.finish()
    sources = by_label(engine.metrics, "vllm:prompt_tokens_by_source", "source")
    assert sources == {"local_compute": 16, "local_cache_hit": 8, "external_kv_transfer": 0}
    assert by_label(engine.metrics, "vllm:prompt_tokens_cached_by_source", "source")["device"] == 8
    found = samples(engine.metrics)
    assert found["vllm:prompt_tokens_cached_total"] == 8
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 16


def test_preemptions_are_counted_for_their_request() -> None:
    engine = Engine(num_blocks=6)
    for first in range(3):
        engine.ask([first + 20] * 5, max_tokens=12, ignore_eos=True)
    engine.finish()
    assert engine.metrics.preemptions > 0
    assert engine.metrics.request_preemptions.total == engine.metrics.preemptions
    assert engine.metrics.request_preemptions.count == 3


def test_what_was_aborted_runs_no_more_from_that_moment_on() -> None:
    engine = Engine()
    state = engine.ask([7, 4], max_tokens=9, ignore_eos=True)
    engine.step()
    assert samples(engine.metrics)["vllm:num_requests_running"] == 1
    engine.abort(state)
    found = samples(engine.metrics)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    engine.finish()
    assert samples(engine.metrics)["vllm:kv_cache_usage_perc"] == 0


class SlowGrammars(NoGrammars):
    """Every grammar is still being built."""

    def ready(self, request: EngineRequest) -> bool:
        return False


def test_requests_that_wait_for_their_grammar_are_told_from_those_that_wait_for_room() -> None:
    engine = Engine(max_num_seqs=1)
    engine.core._grammars = SlowGrammars()
    engine.ask([7, 4], max_tokens=9, ignore_eos=True)
    engine.ask([8, 4], max_tokens=9, ignore_eos=True)
    engine.ask([9, 4], structured_outputs=StructuredOutputsParams(regex="a"))
    engine.step()
    waiting = by_label(engine.metrics, "vllm:num_requests_waiting_by_reason", "reason")
    assert waiting == {"capacity": 1, "deferred": 1}
    assert samples(engine.metrics)["vllm:num_requests_waiting"] == 2


def test_completions_that_end_for_logits_that_are_no_numbers_are_counted() -> None:
    engine = Engine()
    state = engine.ask([7, 4])
    (child,) = state.children
    failed = EngineOutput(
        request_id=child.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error="NaN", error_status=500
    )
    engine.output.process(StepOutputs([failed], StepStats()))
    assert samples(engine.metrics)["vllm:corrupted_requests_total"] == 1


def test_prompt_tokens_leave_the_queue_with_the_first_token_or_the_end() -> None:
    engine = Engine()
    first = engine.ask([7, 8, 4], max_tokens=3, n=2, ignore_eos=True)
    second = engine.ask([9] * 5, max_tokens=3)
    assert engine.output.num_queued_tokens == 8
    engine.abort(second)
    assert engine.output.num_queued_tokens == 3
    engine.step()
    assert engine.output.num_queued_tokens == 0
    engine.abort(first)
    assert engine.output.num_queued_tokens == 0


def test_a_rate_is_right_at_once_and_forgets() -> None:
    rate = Rate()
    assert rate.per_s(5.0) == 0
    for tick in range(200):
        rate.add(100 + tick / 4, 2)
        if tick >= 40:
            assert rate.per_s(100 + tick / 4) == pytest.approx(8, rel=0.1)
    assert rate.per_s(1000.0) == 0


def test_retry_after_follows_the_measured_rates() -> None:
    metrics = Metrics(model_name="m", max_model_len=100)
    assert metrics.retry_after_s(0.0, completions=50, prompt_tokens=10_000) == 1
    for tick in range(100):
        metrics.observe_first_token(0.1, 400, 0, tick / 4)
    assert metrics.retry_after_s(24.75, prompt_tokens=8000) == pytest.approx(5, rel=0.1)
    assert metrics.retry_after_s(24.75, prompt_tokens=10**9) == LONGEST_RETRY_S


def test_counters_go_on_after_the_engine_was_restarted() -> None:
    metrics = Metrics(model_name="m", max_model_len=100)
    metrics.observe_step(StepStats(num_preemptions=3, prefix_queries=10, num_running=2), 0)
    metrics.engine_died()
    assert metrics.last.num_running == 0
    metrics.engine_started(EngineConfig(), block_size=16, num_blocks=8)
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
