"""Cancels that must arrive: handed over synchronously, so that no cancellation of the caller can come between, and sent by
one task that outlives every request. While the broker is away they wait."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from shared.bus import Bus
from shared.errors import BusError
from shared.messages import CancelGenerate, InstanceRef
from shared.subjects import inbox

log = logging.getLogger(__name__)

_MOST = 65536
"""More cancels than this are never kept for a broker that is away; the decoders' deadlines end what is left."""
_RETRY_S = 0.2


class Courier:
    """Carries `CancelGenerate` to decoders, in the order in which they were handed over."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._due: OrderedDict[str, CancelGenerate] = OrderedDict()
        self._work = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self.sent = 0

    def __len__(self) -> int:
        return len(self._due)

    def cancel(self, attempt: str, decoder: InstanceRef, reason: str) -> None:
        """The attempt's cancel will go out now, or as soon as the broker is back."""
        self._due[attempt] = CancelGenerate(attempt=attempt, decoder=decoder, reason=reason)
        if len(self._due) > _MOST:
            self._due.popitem(last=False)
        self._none.clear()
        self._work.set()

    def forget(self, decoder: InstanceRef) -> None:
        """That incarnation has ended, and its attempts with it."""
        for attempt in [a for a, cancel in self._due.items() if cancel.decoder == decoder]:
            del self._due[attempt]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._due:
                if not await self._send_next():
                    await asyncio.sleep(_RETRY_S)
            self._none.set()

    async def drained(self, timeout_s: float) -> None:
        """Until nothing is due, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none.wait()
        except TimeoutError:
            log.warning("%d cancels could not be sent", len(self._due))

    async def _send_next(self) -> bool:
        attempt, cancel = next(iter(self._due.items()))
        try:
            await self._bus.publish(inbox("decode", cancel.decoder), cancel)
        except BusError as error:
            log.info("a cancel waits for the broker: %s", error)
            return False
        if self._due.get(attempt) is cancel:
            del self._due[attempt]
        self.sent += 1
        return True
