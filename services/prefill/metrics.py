"""The prefiller's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.telemetry.metrics import LATENCY_BUCKETS

RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.attempts = Counter("kvmesh_prefill_attempts", "Prefills by how they ended", ["outcome"], registry=registry)
        self.refused = Counter("kvmesh_prefill_refused", "Prefills refused at once", ["code"], registry=registry)
        self.tokens = Counter("kvmesh_prefill_tokens", "Prompt tokens computed", registry=registry)
        self.chunk = Histogram("kvmesh_prefill_chunk_seconds", "One chunk", buckets=LATENCY_BUCKETS, registry=registry)
        self.queue = Histogram(
            "kvmesh_prefill_queue_seconds",
            "From acceptance to the first chunk",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.transfer = Histogram(
            "kvmesh_transfer_seconds",
            "Time in which writes of an attempt were in flight",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.exposed = Histogram(
            "kvmesh_transfer_exposed_seconds",
            "From the end of the last chunk's forward to the completion of the last write",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.hidden = Histogram(
            "kvmesh_transfer_hidden_ratio",
            "Part of an attempt's transfer time that lay under compute",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        self.bytes = Counter("kvmesh_transfer_bytes", "KV written to decoders", registry=registry)
        self.late = Counter("kvmesh_prefill_late_cancels", "Cancels for attempts that are not here", registry=registry)
