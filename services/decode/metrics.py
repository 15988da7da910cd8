"""The decoder's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.decode.sequence import Outcome
from shared.config import MOST_DRAFTS
from shared.telemetry.metrics import LATENCY_BUCKETS


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.attempts = Counter("kvmesh_decode_attempts", "Attempts by how they ended", ["outcome"], registry=registry)
        self.refused = Counter("kvmesh_decode_refused", "Attempts refused at once", ["code"], registry=registry)
        self.kv_wait = Histogram(
            "kvmesh_kv_wait_seconds",
            "From admission to the last write of the KV",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.kv_bytes = Counter("kvmesh_kv_received_bytes", "KV that arrived", registry=registry)
        self.step = Histogram(
            "kvmesh_decode_step_seconds", "One decode step", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.tokens = Counter("kvmesh_decode_tokens", "Tokens generated", registry=registry)
        self.drafted = Counter("kvmesh_decode_drafted_tokens", "Tokens proposed and verified", registry=registry)
        self.accepted = Counter(
            "kvmesh_decode_accepted_tokens", "Of these those that were what the model says", registry=registry
        )
        self.accepted_length = Histogram(
            "kvmesh_decode_accepted_length",
            "Proposed tokens that stood, of each row that had some",
            buckets=range(MOST_DRAFTS + 1),
            registry=registry,
        )
        self.preemptions = Counter(
            "kvmesh_decode_preemptions", "Times a request gave its pages back, to be recomputed", registry=registry
        )
        self.late = Counter(
            "kvmesh_decode_late_messages",
            "Cancels and drains for attempts that are not here",
            ["kind"],
            registry=registry,
        )
        self.fenced = Counter("kvmesh_fenced_peers", "Connections closed to fence a prefiller", registry=registry)

    def note_tokens(self, outcome: Outcome) -> None:
        self.tokens.inc(len(outcome.tokens))
        if outcome.drafted:
            self.drafted.inc(outcome.drafted)
            self.accepted.inc(outcome.accepted)
            self.accepted_length.observe(outcome.accepted)
