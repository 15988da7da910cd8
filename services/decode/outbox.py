"""What goes back to the routers: one message a router a step, in order; kept, not lost, while the broker is away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from shared import subjects
from shared.bus import Bus
from shared.errors import BusError, NobodyListens
from shared.messages import Accepted, Emit, EmitBatch, InstanceRef, StreamStatus

log = logging.getLogger(__name__)

LINGER_S = 10.0
"""How long a router still gets statuses after its last attempt here, so that a lost last message is noticed."""


class Outbox:
    """`emitted()` gives the live attempts of a router with their counts; `gone` is called when a router is no more."""

    def __init__(
        self,
        bus: Bus,
        me: InstanceRef,
        emitted: Callable[[InstanceRef], dict[str, int]],
        gone: Callable[[InstanceRef], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._me = me
        self._emitted = emitted
        self._gone = gone
        self._pending: dict[InstanceRef, list[Emit]] = {}
        self._last_used: dict[InstanceRef, float] = {}
        self._missed: set[InstanceRef] = set()

    def add(self, router: InstanceRef, emit: Emit) -> None:
        self._pending.setdefault(router, []).append(emit)

    def greet(self, router: InstanceRef, now: float) -> None:
        """From now on this router gets statuses: it has an attempt here, though nothing was emitted yet."""
        self._last_used[router] = now

    async def flush(self, now: float) -> None:
        """Publishes what is pending. While the broker is away it stays, bounded by what the attempts may generate."""
        for router in list(self._pending):
            emits = self._pending.pop(router, None)
            if emits is None:
                continue  # another flush has it
            batch = EmitBatch(decoder=self._me, router=router, emits=emits)
            self._last_used[router] = now
            try:
                await self._bus.publish(subjects.inbox("router", router), batch)
            except BusError:
                self._pending[router] = emits + self._pending.get(router, [])

    async def report(self, now: float) -> None:
        """Tells each router that has or lately had attempts here how far they are. A router that is no more loses them."""
        for router in [r for r, used in self._last_used.items() if self._emitted(r) or now - used < LINGER_S]:
            if router not in self._pending:
                await self._report_to(router)
        self._last_used = {r: used for r, used in self._last_used.items() if self._emitted(r) or now - used < LINGER_S}

    async def _report_to(self, router: InstanceRef) -> None:
        status = StreamStatus(decoder=self._me, router=router, emitted=self._emitted(router))
        try:
            await self._bus.request(subjects.inbox("router", router), status, Accepted, timeout_s=1.0)
        except NobodyListens:
            await self._on_nobody(router)
        except BusError as error:
            log.debug("no answer from router %s: %s", router.name, error)
        else:
            self._missed.discard(router)

    async def _on_nobody(self, router: InstanceRef) -> None:
        """Twice in a row it is gone; once it may only be later than we to come back to a broker that was started again."""
        if router not in self._missed:
            self._missed.add(router)
            return
        log.info("router %s is gone", router.name)
        self._missed.discard(router)
        self._last_used.pop(router, None)
        self._pending.pop(router, None)
        await self._gone(router)
