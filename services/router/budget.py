"""How many retries the mesh bears: a part of its recent requests, and a few more. Pure: time comes in as an argument.

A request has its own bound (`max_attempts`); this one is common to all, so that neither one prompt that kills who runs it,
sent again and again, nor an outage of most of the mesh, is multiplied by retries.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0


class Recent:
    """Events of the last `WINDOW_S`, counted by the second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        self._count = 0

    def add(self, now: float) -> None:
        second = int(now)
        before = self._seconds.pop()[1] if self._seconds and self._seconds[-1][0] == second else 0
        self._seconds.append((second, before + 1))
        self._count += 1

    def count(self, now: float) -> int:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._count -= self._seconds.popleft()[1]
        return self._count


class RetryBudget:
    """Of the requests of the last `WINDOW_S`, `ratio` may have been retries, and `floor` besides."""

    def __init__(self, ratio: float, floor: int) -> None:
        self._ratio, self._floor = ratio, floor
        self._requests, self._retries = Recent(), Recent()

    def on_request(self, now: float) -> None:
        self._requests.add(now)

    def left(self, now: float) -> int:
        """Retries that may follow now."""
        allowed = self._floor + int(self._ratio * self._requests.count(now))
        return max(0, allowed - self._retries.count(now))

    def take(self, now: float) -> bool:
        """Whether one more may be made; it is counted."""
        if not self.left(now):
            return False
        self._retries.add(now)
        return True
