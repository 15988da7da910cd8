"""The router's metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.telemetry.metrics import LATENCY_BUCKETS

STATES = ("ready", "draining")


class Intervals(Collector):
    """A histogram without labels that costs a quarter of a microsecond an observation: there is one for every token."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        edges = [*map(str, LATENCY_BUCKETS), "+Inf"]
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "kvmesh_requests",
            "Requests by endpoint and outcome: ok, or how they failed",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.attempts = Counter(
            "kvmesh_attempts",
            "Attempts by outcome: ok, abandoned, or the stage that failed",
            ["outcome"],
            registry=registry,
        )
        self.retries = Counter(
            "kvmesh_retries",
            "Failed attempts that another could have followed: it did, or the budget was spent",
            ["outcome"],
            registry=registry,
        )
        self.refusals = Counter("kvmesh_refusals", "Attempts that a decoder refused", ["code"], registry=registry)
        self.cancels = Counter("kvmesh_cancels", "Attempts that this router took back", registry=registry)
        self.paths = Counter("kvmesh_paths", "Completed requests by the path they took", ["path"], registry=registry)
        self.prompt_tokens = Counter("kvmesh_prompt_tokens", "Prompt tokens of completed requests", registry=registry)
        self.output_tokens = Counter("kvmesh_output_tokens", "Tokens that came from decoders", registry=registry)
        self.transferred = Counter("kvmesh_transferred_bytes", "KV that decoders received", registry=registry)
        self.ttft = self._seconds("kvmesh_ttft_seconds", "From the request to its first token, at the router")
        self.itl = Intervals("kvmesh_itl_seconds", "Between tokens of a stream, at the router")
        registry.register(self.itl)
        self.e2e = self._seconds("kvmesh_e2e_seconds", "From the request to the end of its answer")
        self.queue = self._seconds("kvmesh_queue_seconds", "Wait at the router for room on a pair")
        self.kv_wait = self._seconds("kvmesh_admitted_to_ready_seconds", "From admission to KV ready, by the decoder")
        self._instances = Gauge("kvmesh_instances", "Instances by role and state", ["role", "state"], registry=registry)

    def read(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when scraped."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def read_instances(self, count: Callable[[str, str], int]) -> None:
        """`count(role, state)` is asked when scraped."""
        for role in ("prefill", "decode"):
            for state in STATES:
                self._instances.labels(role, state).set_function(partial(count, role, state))

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=LATENCY_BUCKETS, registry=self.registry)
