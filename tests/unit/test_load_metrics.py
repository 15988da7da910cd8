"""What autoscalers go by."""

from __future__ import annotations

import pytest

from shared.messages import Load
from shared.telemetry.metrics import LoadCollector, new_registry


@pytest.mark.parametrize(
    ("load", "occupancy"),
    [
        (Load(free_pages=10, largest_free_pages=10, total_pages=10), 0.0),
        (Load(free_pages=2, largest_free_pages=2, total_pages=10, running=1), 0.8),
        (Load(free_pages=9, largest_free_pages=9, total_pages=10, running=2, waiting=1), 0.75),
    ],
)
def test_occupancy_is_the_greater_of_pages_and_places(load: Load, occupancy: float) -> None:
    registry = new_registry(LoadCollector(lambda: load, max_batch=4))
    assert registry.get_sample_value("kvmesh_occupancy") == pytest.approx(occupancy)
    assert registry.get_sample_value("kvmesh_running") == load.running
