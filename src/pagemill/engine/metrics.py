"""Figures of the engine, under vLLM's names, types, labels and buckets, so that dashboards work unchanged.

Owns every number that ``/metrics`` shows. Fed once per step and once per finished request, never once per token; the
text is made when someone asks. Must not know HTTP, sockets or the model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from pagemill.config import EngineConfig
from pagemill.engine.wire import StepStats
from pagemill.params import FinishReason

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["Histogram", "Metrics", "RequestStats", "RunStats"]

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_NEXT_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""The limits that a request may be refused for."""
CACHE_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
"""Where vLLM looks for cached tokens. Here they are in the KV cache itself, which it calls the device's."""
RATE_SPAN_S = 30.0
LONGEST_RETRY_S = 60.0


class Histogram:
    """Counts of values in buckets; many equal values cost as much as one."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = about
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``value``, ``times`` times. A bucket holds the values up to and including its bound."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus wants them, the last one for infinity."""
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class Rate:
    """Events per second, counted over the last half minute or so: the older, the less."""

    __slots__ = ("_at_s", "_began_s", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at_s = self._began_s = -1.0

    def add(self, now_s: float, amount: float) -> None:
        """So many happened by now."""
        if self._began_s < 0:
            self._began_s = now_s
        self._sum = self._weighed(now_s) + amount
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 where too little happened to tell."""
        found = self._weighed(now_s)
        if found < 1:
            return 0.0
        age_s = max(1.0, now_s - self._began_s)
        return found / (RATE_SPAN_S * (1 - math.exp(-age_s / RATE_SPAN_S)))

    def _weighed(self, now_s: float) -> float:
        return self._sum * math.exp((self._at_s - now_s) / RATE_SPAN_S)


class RequestStats(msgspec.Struct):
    """One finished completion. Times are durations in seconds."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    e2e_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    num_computed_prompt_tokens: int = 0
    """Prompt tokens that were not found in the cache; 0 where it ended before its first token."""
    num_preemptions: int = 0


class RunStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the engine was made."""

    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    allocated_slot_steps: int
    """KV slots held, summed over the steps."""
    filled_slot_steps: int
    """Of those, slots that held a token."""


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to ``limit``."""
    values = (mantissa * 10**exponent for exponent in range(len(str(limit))) for mantissa in (1, 2, 5))
    return [float(value) for value in values if value <= limit]


def _cache_config(config: EngineConfig, block_size: object, num_blocks: object) -> dict[str, str]:
    """vLLM's names for how the KV cache is laid out."""
    return {
        "block_size": str(block_size),
        "num_gpu_blocks": str(num_blocks),
        "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
    }


class Metrics:
    """All counters, gauges and histograms of one engine, from 0 before the first request."""

    def __init__(self, *, model_name: str, max_model_len: int) -> None:
        self.model_name = model_name
        self.last = StepStats()
        """Figures of the newest step."""
        self.num_open = 0
        """Sequences that the front waits for, running or queued."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.restarts = 0
        self.steps = 0
        self.cached_prompt_tokens = 0
        self.corrupted = 0
        """Completions that ended because their logits were no numbers."""
        self.rejections = dict.fromkeys(REJECTIONS, 0)
        self.cache_config = _cache_config(EngineConfig(), "", "")
        self.slots_allocated = 0
        """KV slots held, summed over the steps."""
        self.slots_filled = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._ends = Rate()
        self._prefills = Rate()
        lengths = _one_two_five(max_model_len)
        self.first_token_s = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self.next_token_s = Histogram("vllm:inter_token_latency_seconds", "One token to the next.", _NEXT_TOKEN)
        self.mean_token_s = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", _NEXT_TOKEN
        )
        self.e2e_s = Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST)
        self.queued_s = Histogram("vllm:request_queue_time_seconds", "Arrival to first step.", _REQUEST)
        self.inference_s = Histogram("vllm:request_inference_time_seconds", "First step to last token.", _REQUEST)
        self.prefill_s = Histogram("vllm:request_prefill_time_seconds", "First step to first token.", _REQUEST)
        self.decode_s = Histogram("vllm:request_decode_time_seconds", "First token to last token.", _REQUEST)
        self.request_prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.request_output = Histogram("vllm:request_generation_tokens", "Output tokens of a request.", lengths)
        self.longest_output = Histogram(
            "vllm:request_max_num_generation_tokens", "Output tokens of a request's longest completion.", lengths
        )
        self.params_n = Histogram("vllm:request_params_n", "Parameter n of a request.", (1, 2, 5, 10, 20))
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", "Parameter max_tokens.", lengths)
        self.step_tokens = Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKENS)
        self.computed_prompt = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that no cache had.", lengths
        )
        self.request_preemptions = Histogram(
            "vllm:request_num_preemptions", "How often a request was put back for memory.", _PREEMPTIONS
        )

    @property
    def num_running(self) -> int:
        """Sequences in the running batch; what was aborted since the last step runs no more."""
        return min(self.last.num_running, self.num_open)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step, known at once and not only after the next one."""
        return self.num_open - self.num_running

    @property
    def num_held(self) -> int:
        """Of those, sequences that wait for their grammar, not for room."""
        return min(self.last.num_held, self.num_waiting)

    @property
    def slot_utilization(self) -> float:
        """Share of the KV slots held by requests that hold a token, averaged over the steps; 0 before the first."""
        return self.slots_filled / self.slots_allocated if self.slots_allocated else 0.0

    def observe_step(self, stats: StepStats, num_new_tokens: int) -> None:
        """Take in one step (or, with no tokens, the figures after an abort)."""
        last, self.last = self.last, stats
        self.prefix_queries += stats.prefix_queries - last.prefix_queries
        self.prefix_hits += stats.prefix_hits - last.prefix_hits
        self.preemptions += stats.num_preemptions - last.num_preemptions
        if stats.num_tokens:
            self.steps += 1
            self.generation_tokens += num_new_tokens
            self.slots_allocated += stats.slots_allocated
            self.slots_filled += stats.slots_filled
            self.step_tokens.observe(stats.num_tokens)

    def observe_first_token(self, latency_s: float, num_prompt_tokens: int, num_cached: int, now_s: float) -> None:
        """A request's prompt is computed, or was found in the cache, and its first token is there."""
        self.first_token_s.observe(latency_s)
        self.prompt_tokens += num_prompt_tokens
        self.cached_prompt_tokens += num_cached
        self._prefills.add(now_s, num_prompt_tokens)

    def note_rejection(self, limit: str) -> None:
        """A request was refused: which of :data:`REJECTIONS` it would have passed."""
        self.rejections[limit] += 1

    def retry_after_s(self, now_s: float, *, completions: int = 0, prompt_tokens: int = 0) -> float:
        """When so many completions will have ended and prompt tokens left the queue, at the rates measured last.

        1 s where nothing was measured, a minute at most.
        """
        wait_s = 1.0
        for amount, rate in ((completions, self._ends.per_s(now_s)), (prompt_tokens, self._prefills.per_s(now_s))):
            if rate:
                wait_s = max(wait_s, amount / rate)
        return min(wait_s, LONGEST_RETRY_S)

    def observe_finished(self, stats: RequestStats, now_s: float) -> None:
        """A completion ended, for whatever reason."""
        self._ends.add(now_s, 1)
        self.computed_prompt.observe(stats.num_computed_prompt_tokens)
        self.request_preemptions.observe(stats.num_preemptions)
        self._finished[stats.finish_reason] += 1
        self.e2e_s.observe(stats.e2e_s)
        self.queued_s.observe(stats.queued_s)
        self.prefill_s.observe(stats.prefill_s)
        self.decode_s.observe(stats.decode_s)
        self.inference_s.observe(stats.prefill_s + stats.decode_s)
        self.request_prompt.observe(stats.num_prompt_tokens)
        self.request_output.observe(stats.num_output_tokens)
        self.params_max_tokens.observe(stats.max_tokens)
        if stats.num_output_tokens > 1:
            self.mean_token_s.observe(stats.decode_s / (stats.num_output_tokens - 1))

    def totals(self) -> RunStats:
        """Counters as one value."""
        return RunStats(
            num_steps=self.steps,
            num_prompt_tokens=self.prompt_tokens,
            num_generated_tokens=self.generation_tokens,
            num_preemptions=self.preemptions,
            prefix_query_tokens=self.prefix_queries,
            prefix_hit_tokens=self.prefix_hits,
            allocated_slot_steps=self.slots_allocated,
            filled_slot_steps=self.slots_filled,
        )

    def finished(self, reason: FinishReason) -> int:
        """Completions that ended for this reason."""
        return self._finished[reason]

    def engine_started(self, config: EngineConfig, *, block_size: int, num_blocks: int) -> None:
        """A (new) engine process answers; its counters begin at 0."""
        self.last = StepStats()
        self.cache_config = _cache_config(config, block_size, num_blocks)

    def engine_died(self) -> None:
        """The gauges of a process that is gone are 0."""
        self.last = StepStats()

    def render(self) -> str:
        """Prometheus' text format."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterable[Metric]:
        """All figures, for a Prometheus registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names, values = ["model_name", "engine"], [self.model_name, "0"]
        for name, about, value in self._gauges():
            gauge = GaugeMetricFamily(name, about, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, about, value in self._counters():
            counter = CounterMetricFamily(name, about, labels=names)
            counter.add_metric(values, value)
            yield counter
        for name, about, label, by_label in self._labelled():
            kind = GaugeMetricFamily if name == "vllm:num_requests_waiting_by_reason" else CounterMetricFamily
            family = kind(name, about, labels=[*names, label])
            for text, value in by_label.items():
                family.add_metric([*values, text], value)
            yield family
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused by a limit of the queue.", labels=["model_name", "reason"]
        )
        for text, number in self.rejections.items():
            rejections.add_metric([self.model_name, text], number)
        yield rejections
        named = [(histogram.name, histogram) for histogram in self._histograms()]
        for name, histogram in [*named, ("vllm:time_per_output_token_seconds", self.next_token_s)]:
            buckets = HistogramMetricFamily(name, histogram.help, labels=names)
            buckets.add_metric(values, histogram.buckets(), histogram.total)
            yield buckets
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is laid out.", labels=[*names, *self.cache_config]
        )
        info.add_metric([*values, *self.cache_config.values()], 1)
        yield info

    def _gauges(self) -> list[tuple[str, str, float]]:
        last = self.last
        return [
            ("vllm:num_requests_running", "Requests in the running batch.", self.num_running),
            ("vllm:num_requests_waiting", "Requests waiting for their first step.", self.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", last.kv_usage),
            ("pagemill:kv_slot_utilization", "Share of held KV slots that hold a token.", self.slot_utilization),
        ]

    def _counters(self) -> list[tuple[str, str, float]]:
        return [
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.prefix_hits),
            ("vllm:num_preemptions", "Requests put back into the queue for memory.", self.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens computed or found.", self.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self.cached_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self.generation_tokens),
            ("vllm:corrupted_requests", "Completions ended because logits were no numbers.", self.corrupted),
            ("pagemill:engine_steps", "Steps of the engine.", self.steps),
            ("pagemill:engine_restarts", "Times the engine process died and was started again.", self.restarts),
        ]

    def _labelled(self) -> list[tuple[str, str, str, dict[str, float]]]:
        """Families with one label more: name, help, the label's name, and a figure for each of its values."""
        cached, held = self.cached_prompt_tokens, self.num_held
        sources = {
            "local_compute": self.prompt_tokens - cached,
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }
        return [
            (
                "vllm:num_requests_waiting_by_reason",
                "Requests waiting: for room (capacity), or for their grammar (deferred).",
                "reason",
                {"capacity": self.num_waiting - held, "deferred": held},
            ),
            ("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", dict(sources)),
            (
                "vllm:prompt_tokens_cached_by_source",
                "Cached prompt tokens by the memory they were in.",
                "source",
                dict.fromkeys(CACHE_TIERS, 0.0) | {"device": cached},
            ),
            (
                "vllm:request_success",
                "Completions that ended.",
                "finished_reason",
                {reason.value: number for reason, number in self._finished.items()},
            ),
        ]

    def _histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]
