"""A small OTLP/HTTP receiver: keeps the spans that are sent to it, so that a benchmark or a test can read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

Value = str | bool | int | float


class ReceivedSpan(msgspec.Struct, frozen=True):
    """Ids in hex; times in nanoseconds since the epoch; `service` is the resource's service.name."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Value]
    failed: bool

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


class Receiver:
    """All spans so far, in the order of arrival. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        self.endpoint = ""

    def add(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            self._spans.extend(_spans(request))
            self._changed.notify_all()

    @property
    def all(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        with self._changed:
            return [span for span in self._spans if span.trace_id == trace_id]

    def wait_for(self, trace_id: str, names: set[str], timeout_s: float = 15.0) -> list[ReceivedSpan]:
        """The spans of a trace once all of `names` are among them. Raises `TimeoutError` naming what is missing."""

        def missing() -> set[str]:
            return names - {span.name for span in self._spans if span.trace_id == trace_id}

        with self._changed:
            if not self._changed.wait_for(lambda: not missing(), timeout_s):
                raise TimeoutError(f"trace {trace_id} has no {', '.join(sorted(missing()))}")
        return self.trace(trace_id)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Listens on a free port of loopback; `endpoint` is what KVMESH_OTLP_ENDPOINT takes."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            found.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        own = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    own.get("service.name", ""),
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {a.key: _value(a.value) for a in span.attributes},
                    span.status.code == 2,
                )


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    found: Value = getattr(value, kind) if kind in ("string_value", "bool_value", "int_value", "double_value") else ""
    return found
