"""The attempts of a decoder from admission to their end: the part before the running batch.

An attempt waits for one of two things: its KV, or a failure (the prefiller refused or failed, its connection was lost, the
router cancelled, the deadline passed). Whichever comes first decides; clean-up is then the receiver's `reclaim`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from opentelemetry.context import Context

from services.decode.sequence import Sequence
from shared.errors import AttemptFailed
from shared.messages import Announce, InstanceRef
from shared.messenger.receiver import Incoming


class Cancelled(Exception):
    """The router does not want the attempt any more; nobody waits for an answer."""


@dataclass(eq=False)
class Attempt:
    sequence: Sequence
    prefiller: Announce | None
    context: Context
    admitted_ns: int
    incoming: Incoming | None = None
    failure: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ready_ns: int = 0

    @property
    def router(self) -> InstanceRef:
        return self.sequence.router

    def fail(self, error: AttemptFailed | Cancelled) -> None:
        """Ends the wait. Only the first failure counts."""
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # it may come when nobody waits any more: that is not an error of the program

    def end(self) -> AttemptFailed | Cancelled | None:
        """The failure, if there was one."""
        if not self.failure.done():
            return None
        error = self.failure.exception()
        assert isinstance(error, AttemptFailed | Cancelled)
        return error

    async def wait_for_kv(self, arrived: asyncio.Task[None]) -> None:
        """Until `arrived` ends well, which counts even where a failure came at the same moment: then no write is left that
        could be waited for. Raises the error of `arrived`, the failure, or `AttemptFailed` at the deadline."""
        left = self.sequence.deadline - asyncio.get_running_loop().time()
        await asyncio.wait({arrived, self.failure}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
        if arrived.done():
            return arrived.result()
        if (error := self.end()) is not None:
            raise error
        raise AttemptFailed("waiting for KV", "the request's deadline passed", retryable=False)
