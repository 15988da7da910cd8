"""The last requests: bounded, and what is counted of them."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.recent import Finished, Percentiles, Recent, percentiles


def finished(**fields: Any) -> Finished:
    plain: dict[str, Any] = {
        "ended_unix_s": 0.0, "outcome": "ok", "prefiller": "p0", "decoder": "d0", "tries": 1, "prompt_tokens": 4,
        "output_tokens": 5, "total_s": 3.0, "queue_s": 0.1, "kv_wait_s": 0.2, "first_step_s": 0.3, "ttft_s": 1.0,
        "stream_s": 2.0,
    }  # fmt: skip
    return Finished(**{**plain, **fields})


def test_only_the_last_are_kept() -> None:
    recent = Recent(3)
    for total in range(5):
        recent.add(finished(total_s=float(total)))
    assert len(recent) == 3
    assert [one.total_s for one in recent.requests()] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], Percentiles(0, None, None, None)),
        ([7.0], Percentiles(1, 7.0, 7.0, 7.0)),
        ([float(n) for n in range(100, 0, -1)], Percentiles(100, 50.0, 90.0, 99.0)),
        ([1.0, 2.0, 3.0], Percentiles(3, 2.0, 3.0, 3.0)),
    ],
)
def test_percentiles_by_nearest_rank(values: list[float], expected: Percentiles) -> None:
    assert percentiles(values) == expected


def test_failed_requests_are_shown_and_not_measured() -> None:
    recent = Recent()
    recent.add(finished())
    recent.add(finished(outcome="failed", ttft_s=9.0, stream_s=9.0))
    recent.add(finished(output_tokens=1, stream_s=0.0))
    assert len(recent) == 3
    assert (recent.ttft().count, recent.ttft().p99) == (2, 1.0)
    assert (recent.itl().count, recent.itl().p50) == (1, 0.5)
