"""What a prefill leaves behind in traces and histograms."""

from __future__ import annotations

from opentelemetry import trace

from services.prefill import overlap
from services.prefill.metrics import PrefillMetrics
from services.prefill.running import Running
from services.prefill.scheduler import ChunkPart
from shared.engine.protocol import StepDone
from shared.messenger.sender import SentReport
from shared.telemetry import traces


def _is_traced(running: Running) -> bool:
    return trace.get_current_span(running.context).get_span_context().is_valid


def record_chunk(running: Running, part: ChunkPart, done: StepDone) -> None:
    """One chunk's forward, as far as it was this attempt's."""
    if not _is_traced(running):
        return
    if part.start == 0:
        traces.record("prefill.queue", running.context, running.accepted_ns, running.started_ns)
    attributes = {"kvmesh.chunk.start": part.start, "kvmesh.chunk.tokens": part.end - part.start}
    traces.record("prefill.chunk", running.context, done.begin_ns, done.end_ns, attributes=attributes)


def record_sent(running: Running, report: SentReport, metrics: PrefillMetrics) -> overlap.Overlap:
    """The transfer as a whole and, where traced, each layer of each chunk with its bytes and what of it was hidden."""
    layers = [
        (layer.posted_ns, layer.completed_ns) for chunk in report.chunks for layer in chunk.layers if chunk.writes
    ]
    tail = (report.tail.layers[0].posted_ns, report.tail.layers[0].completed_ns)
    whole = overlap.measure([*layers, tail], running.forwards)
    metrics.transfer.observe(whole.transfer_ns / 1e9)
    metrics.exposed.observe(whole.exposed_ns / 1e9)
    metrics.hidden.observe(whole.hidden_ratio)
    metrics.bytes.inc(report.bytes)
    if _is_traced(running):
        _record_layers(running, report, whole)
    return whole


def _record_layers(running: Running, report: SentReport, whole: overlap.Overlap) -> None:
    begin = min(
        (layer.posted_ns for chunk in report.chunks for layer in chunk.layers), default=report.tail.layers[0].posted_ns
    )
    attributes = {
        "kvmesh.bytes": report.bytes,
        "kvmesh.transfer_s": whole.transfer_ns / 1e9,
        "kvmesh.hidden_ratio": whole.hidden_ratio,
        "kvmesh.exposed_s": whole.exposed_ns / 1e9,
    }
    end = report.tail.layers[0].completed_ns
    transfer = traces.record("kv.transfer", running.context, begin, end, attributes=attributes)
    parent = traces.context_of(transfer)
    for number, chunk in enumerate(report.chunks):
        for index, layer in enumerate(chunk.layers):
            part = overlap.measure([(layer.posted_ns, layer.completed_ns)], running.forwards)
            traces.record(
                "kv.layer",
                parent,
                layer.posted_ns,
                layer.completed_ns,
                attributes={
                    "kvmesh.chunk": number,
                    "kvmesh.layer": index,
                    "kvmesh.bytes": chunk.bytes // len(chunk.layers),
                    "kvmesh.hidden_ratio": part.hidden_ratio,
                },
            )
