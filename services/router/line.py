"""The line of requests that wait at the router for room: first come, first served, bounded in length and in time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from services.router.dispatch import NoPair, NoRoom
from shared.errors import Refused

W = TypeVar("W")
P = TypeVar("P")

_WARM = 8
"""Departures before their rate is believed."""
_SMOOTHING = 0.1


class Pace:
    """How fast the line moves, from its departures while somebody waits. Pure."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._interval_s = 0.0
        self._seen = 0

    def departed(self, now: float) -> None:
        if self._last is not None:
            self._seen += 1
            self._interval_s += max(_SMOOTHING, 1 / self._seen) * (now - self._last - self._interval_s)
        self._last = now

    def idle(self) -> None:
        """Nobody waits: the gap to the next departure says nothing of how fast the line moves."""
        self._last = None

    def wait_s(self, position: int) -> float | None:
        """Predicted wait of whoever is `position`-th, from 1. None: not known yet."""
        return position * self._interval_s if self._seen >= _WARM else None


class Line(Generic[W, P]):
    """Waiters in order. `offer` decides for one; a place that it gives is taken from then on, and given back by `undo`
    where its waiter has gone in the same moment. Used from one event loop."""

    def __init__(
        self,
        offer: Callable[[W], P | NoRoom | NoPair],
        undo: Callable[[P], None],
        *,
        max_length: int,
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`patience_s()`: how long a waiter bears that there is no pair at all, from its own start."""
        self._offer, self._undo = offer, undo
        self._max_length = max_length
        self._patience_s = patience_s
        self._waiters: OrderedDict[asyncio.Future[P], W] = OrderedDict()
        self._since: dict[asyncio.Future[P], float] = {}
        self.pace = Pace()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, who: W, deadline: float, *, again: bool = False) -> P:
        """The place for `who`, at once where there is room and nobody before it. `again`: it was here before, and goes to
        the front.

        Raises `Refused`: 429 where the line is full, or the wait cannot end, or did not end, by `deadline` (loop time);
        503 where nobody is there to wait for.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[P] = loop.create_future()
        self._waiters[future] = who
        self._since[future] = loop.time()
        if again:
            self._waiters.move_to_end(future, last=False)
        try:
            self.kick()
            if future.done():
                return future.result()
            if not again or not self._max_length:
                self._check(deadline - loop.time())
            return await self._until(future, deadline)
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(future.result())
            raise
        finally:
            self._waiters.pop(future, None)
            self._since.pop(future, None)
            if not self._waiters:
                self.pace.idle()

    def kick(self) -> None:
        """Something changed: offers to the waiters in order, until one must wait for what all wait for."""
        for future, who in list(self._waiters.items()):
            if future.done():
                continue
            offered = self._offer(who)
            if isinstance(offered, NoRoom):
                if offered.personal:
                    continue
                return
            if isinstance(offered, NoPair):
                if self._bears(future):
                    continue
                del self._waiters[future]
                future.set_exception(Refused(offered.reason))
            else:
                del self._waiters[future]
                future.set_result(offered)
                if self._waiters:
                    self.pace.departed(asyncio.get_running_loop().time())

    def _bears(self, future: asyncio.Future[P]) -> bool:
        """There is no pair now; whether this waiter goes on waiting for one to come back. It is asked again at every `kick`."""
        return asyncio.get_running_loop().time() - self._since[future] < self._patience_s()

    def _check(self, limit_s: float) -> None:
        position = len(self._waiters)
        expected = self.pace.wait_s(position)
        if position > self._max_length:
            hint = expected if expected is not None else 1.0
            raise Refused(f"all instances are busy and {position - 1} requests wait", retry_after_s=hint, status=429)
        if expected is not None and expected > limit_s:
            reason = (
                f"all instances are busy; the wait would be about {expected:.0f} s, and {limit_s:.0f} s are allowed"
            )
            raise Refused(reason, retry_after_s=expected - limit_s, status=429)

    async def _until(self, future: asyncio.Future[P], deadline: float) -> P:
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            raise Refused("all instances stayed busy", retry_after_s=self._hint(), status=429) from None

    def _hint(self) -> float:
        return self.pace.wait_s(len(self._waiters) or 1) or 1.0
