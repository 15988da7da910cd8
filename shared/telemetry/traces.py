"""OpenTelemetry spans across the mesh, in W3C trace context.

Without an endpoint the API's no-op tracer stays in place and the SDK is not even imported. Spans that are known only
afterwards (a layer's transfer, a chunk) are recorded with explicit times: `record`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | bool | int | float]


def configure(service: str, instance: str, endpoint: str) -> None:
    """Export this process's spans to an OTLP/HTTP collector at `endpoint` (its base URL). Empty: no spans, no cost."""
    if not endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    trace.set_tracer_provider(provider)


def shutdown() -> None:
    """Send what is buffered; bounded by the exporter's timeout."""
    provider = trace.get_tracer_provider()
    end = getattr(provider, "shutdown", None)
    if end is not None:
        end()


def tracer() -> Tracer:
    return trace.get_tracer("kvmesh")


def inject(context: Context | None = None) -> dict[str, str]:
    """The headers that carry `context` (default: the current one); empty where nothing is traced."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, context=context)
    return headers


def extract(headers: Mapping[str, str] | None) -> Context:
    """The context that headers carry; a fresh root where they carry none."""
    return _PROPAGATOR.extract(headers or {}, context=Context())


def context_of(span: Span) -> Context:
    return trace.set_span_in_context(span, Context())


@contextmanager
def span(
    name: str,
    *,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
) -> Iterator[Span]:
    """A span around a block; an exception is recorded and marks it failed."""
    with tracer().start_as_current_span(name, context=parent, kind=kind, attributes=attributes) as current:
        yield current


def record(
    name: str,
    parent: Context,
    begin_ns: int,
    end_ns: int,
    *,
    attributes: Attributes | None = None,
    error: str | None = None,
) -> Span:
    """A span whose times are known afterwards. `begin_ns` and `end_ns` are CLOCK_MONOTONIC nanoseconds."""
    offset = time.time_ns() - time.monotonic_ns()
    done = tracer().start_span(name, context=parent, start_time=begin_ns + offset, attributes=attributes)
    if error is not None:
        done.set_status(Status(StatusCode.ERROR, error))
    done.end(end_time=end_ns + offset)
    return done
