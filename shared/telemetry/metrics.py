"""Prometheus metrics that several services have in common. Each process has one registry, made by its service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.messages import Load

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
"""Seconds; from a transfer of one page to a prompt of a hundred thousand tokens."""


class LedgerCollector(Collector):
    """The page ledgers, one a data parallel rank, read when scraped. The states of a rank sum to its `kvmesh_pool_pages`."""

    def __init__(self, ledgers: Sequence[Callable[[], Mapping[Any, int]]], page_tokens: int) -> None:
        self._ledgers = ledgers
        self._page_tokens = page_tokens

    def collect(self) -> Iterator[Metric]:
        pages = GaugeMetricFamily("kvmesh_pages", "Pages of a KV pool by state", labels=["dp_rank", "state"])
        pools = GaugeMetricFamily("kvmesh_pool_pages", "Pages of a KV pool, all states", labels=["dp_rank"])
        for rank, ledger in enumerate(self._ledgers):
            counts = ledger()
            pools.add_metric([str(rank)], sum(counts.values()))
            for state, count in counts.items():
                pages.add_metric([str(rank), state], count)
        yield pages
        yield pools
        yield GaugeMetricFamily("kvmesh_page_tokens", "Tokens in a page", value=self._page_tokens)


class LoadCollector(Collector):
    """What an instance announces of its load, read when scraped: what autoscalers go by."""

    def __init__(self, load: Callable[[], Load], max_batch: int) -> None:
        """`max_batch`: requests that can run at once (decode) or be here (prefill)."""
        self._load, self._max_batch = load, max_batch

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, text, value in (
            ("kvmesh_running", "Requests in the running batch, or in the current chunk", load.running),
            ("kvmesh_waiting", "Requests that are here and do not run", load.waiting),
            ("kvmesh_queued_prefill_tokens", "Prompt tokens still to be computed", load.queued_prefill_tokens),
            (
                "kvmesh_occupancy",
                "Part of the pages, or of the places, that is taken: the greater",
                self._occupancy(load),
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def _occupancy(self, load: Load) -> float:
        pages = 1 - load.free_pages / load.total_pages if load.total_pages else 1.0
        return max(pages, (load.running + load.waiting) / self._max_batch)


def new_registry(*collectors: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return registry


class Smoothed:
    """An exponentially weighted mean; None until something was measured. `weight` is that of the newest value."""

    __slots__ = ("_weight", "value")

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, measured: float) -> None:
        self.value = measured if self.value is None else self.value + self._weight * (measured - self.value)
