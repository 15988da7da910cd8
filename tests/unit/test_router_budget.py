"""The retry budget: a part of recent requests, a floor, and a window that moves on."""

from __future__ import annotations

from services.router.budget import WINDOW_S, RetryBudget


def taken(budget: RetryBudget, now: float, tries: int = 100) -> int:
    return sum(budget.take(now) for _ in range(tries))


def test_the_floor_alone() -> None:
    budget = RetryBudget(0.0, 3)
    assert taken(budget, 0.0) == 3
    assert budget.left(0.0) == 0


def test_a_part_of_the_requests_besides() -> None:
    budget = RetryBudget(0.2, 1)
    for i in range(50):
        budget.on_request(i / 10)
    assert taken(budget, 5.0) == 11


def test_what_is_long_ago_does_not_count() -> None:
    budget = RetryBudget(0.1, 2)
    for _ in range(100):
        budget.on_request(0.5)
    assert taken(budget, 1.0) == 12
    assert taken(budget, WINDOW_S + 0.9) == 0, "the requests are gone, and the retries count still"
    assert taken(budget, WINDOW_S + 2.0) == 2


def test_nothing_is_allowed_where_nothing_is_set() -> None:
    budget = RetryBudget(0.0, 0)
    budget.on_request(0.0)
    assert not budget.take(0.0)


def test_the_count_is_bounded_by_seconds_not_by_events() -> None:
    budget = RetryBudget(0.2, 0)
    for i in range(10_000):
        budget.on_request(i / 100)
    assert budget.left(99.5) == int(0.2 * 3000)
    assert len(budget._requests._seconds) <= WINDOW_S + 1
