"""The cheap histogram says what Prometheus's own would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from services.router.metrics import Intervals, RouterMetrics
from shared.telemetry.metrics import LATENCY_BUCKETS


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if not line.startswith("#") and "_created" not in line]


@given(st.lists(st.one_of(st.floats(0, 200), st.sampled_from(LATENCY_BUCKETS)), max_size=50))
def test_it_is_a_histogram(seconds: list[float]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("x_seconds", "x", buckets=LATENCY_BUCKETS, registry=theirs)
    cheap = Intervals("x_seconds", "x")
    ours.register(cheap)
    for value in seconds:
        reference.observe(value)
        cheap.observe(value)
    assert lines(ours) == lines(theirs)


def test_instances_are_counted_when_scraped() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    there = {("decode", "ready"): 2}
    metrics.read_instances(lambda role, state: there.get((role, state), 0))
    assert metrics.registry.get_sample_value("kvmesh_instances", {"role": "decode", "state": "ready"}) == 2
    there.clear()
    assert metrics.registry.get_sample_value("kvmesh_instances", {"role": "decode", "state": "ready"}) == 0
