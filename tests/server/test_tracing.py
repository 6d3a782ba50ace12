"""Spans: the GenAI attributes, real times, and the caller's span as their parent."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pagemill.engine.caller import Caller
from pagemill.engine.record import RequestRecord
from pagemill.errors import ConfigError
from pagemill.server.tracing import Tracer, otlp_processor
from tests.server.records import SPAN_ID, TRACE_ID, record


def span_of(given: RequestRecord) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter), "the-model")
    tracer.finished(given)
    (span,) = exporter.get_finished_spans()
    tracer.close()
    return span


def test_a_span_has_the_attributes_of_generative_ai() -> None:
    span = span_of(record())
    assert span.kind is SpanKind.SERVER
    assert span.name == "llm_request"
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagemill",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.model": "the-model",
        "gen_ai.response.model": "the-model",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.prompt_tokens": 11,
        "gen_ai.usage.completion_tokens": 14,
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.usage.cached_tokens": 8,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 1.5,
        "gen_ai.latency.time_in_model_inference": 2.0,
        "http.route": "/v1/chat/completions",
    }
    assert span.resource.attributes["service.name"] == "pagemill"


def test_a_span_lasts_as_long_as_its_request() -> None:
    span = span_of(record())
    assert span.end_time == 1_700_000_010_500_000_000
    assert span.start_time == 1_700_000_008_000_000_000


def test_the_callers_span_is_the_parent() -> None:
    span = span_of(record())
    assert span.parent is not None
    assert span.context is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize("sent", [(), (("traceparent", "nonsense"),), (("tracestate", "a=b"),)])
def test_without_a_valid_parent_a_trace_begins(sent: tuple[tuple[str, str], ...]) -> None:
    span = span_of(record(caller=Caller(route="/v1/completions", trace=sent)))
    assert span.parent is None
    assert (span.attributes or {})["gen_ai.operation.name"] == "text_completion"


def test_a_failed_request_is_a_failed_span() -> None:
    span = span_of(record(error="secret prompt", finish_reasons=["error"], first_token_s=None))
    assert span.status.status_code is StatusCode.ERROR
    assert "secret" not in span.to_json()
    assert "gen_ai.latency.time_to_first_token" not in (span.attributes or {})


@pytest.mark.parametrize("endpoint", ["ftp://host", "http://", "://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        otlp_processor(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["grpc://localhost:1", "localhost:1", "http://localhost:4318", "https://h.test/v1/traces"]
)
def test_either_protocol_of_otlp_is_spoken(endpoint: str) -> None:
    processor = otlp_processor(endpoint)
    kind = type(processor.span_exporter).__module__  # type: ignore[attr-defined]
    assert ("grpc" in kind) == (not endpoint.startswith("http"))
    processor.shutdown()


def test_without_the_extra_the_flag_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match="otel"):
        otlp_processor("grpc://localhost:4317")
