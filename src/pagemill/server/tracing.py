"""A span for each finished request, by OpenTelemetry, with the attributes of its conventions for generative AI.

Owns the spans' names and attributes (vLLM's where it has one) and the exporter. The libraries are an optional extra,
imported only where traces are asked for. Spans are exported by a thread of the SDK's; prompts are never in them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pagemill.engine.record import RequestRecord
from pagemill.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracer", "otlp_processor"]

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"), "embeddings"),
}
"""Route -> what it does, in the conventions' words; chat on all others."""

FLUSH_S = 3.0


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Exports in batches to an OTLP collector: grpc://host:4317, or http(s)://host:4318/v1/traces."""
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'pagemill[otel]'") from None
    address = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    if address.scheme not in {"grpc", "http", "https"} or not address.netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint={endpoint!r} is no address; give grpc://host:4317 or http://host:4318/v1/traces"
        )
    exporter: SpanExporter
    if address.scheme == "grpc" or (not address.path.strip("/") and address.port != 4318):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter(endpoint=address.netloc, insecure=address.scheme != "https")
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter = HttpExporter(endpoint=endpoint if address.path.strip("/") else endpoint.rstrip("/") + "/v1/traces")
    return BatchSpanProcessor(exporter)


class Tracer:
    """Makes the spans of one server."""

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "pagemill"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pagemill")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def finished(self, record: RequestRecord) -> None:
        """Make the span of a request that has ended; its parent is the caller's own span, if it sent one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(record.caller.trace)),
            kind=SpanKind.SERVER,
            attributes=self._attributes(record),
            start_time=int((record.ended_s - record.e2e_s) * 1e9),
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", record.finish_reasons[0] if record.finish_reasons else "error")
        span.end(end_time=int(record.ended_s * 1e9))

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        params, operation = record.params, OPERATIONS.get(record.caller.route, "chat")
        found = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pagemill",
            "gen_ai.request.id": record.request_id,
            "gen_ai.response.id": record.request_id,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.n": params.n,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_output_tokens,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cached_tokens": record.num_cached_tokens,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.latency.e2e": record.e2e_s,
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.time_to_first_token": record.first_token_s,
            "gen_ai.latency.time_in_model_prefill": record.prefill_s,
            "gen_ai.latency.time_in_model_decode": record.decode_s,
            "gen_ai.latency.time_in_model_inference": record.prefill_s + record.decode_s,
            "http.route": record.caller.route,
        }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Export what waits, for a few seconds at most: a collector that is gone must not hold up the end."""
        ending = threading.Thread(target=self._provider.shutdown, name="pagemill-traces-end", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
