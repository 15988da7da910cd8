"""The attempts of a decoder, from admission to their end.

An attempt first waits for one of two things: its KV, or a failure (the prefiller refused or failed, its connection was lost,
the router cancelled, the deadline passed). Whichever comes first decides; clean-up is then the receiver's `reclaim`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.context import Context

from services.decode.metrics import DecodeMetrics
from services.decode.outbox import Outbox
from services.decode.rank import DecodeRank
from services.decode.sequence import Sequence
from shared.errors import AttemptFailed
from shared.messages import Announce, Emit, InstanceRef
from shared.messenger.receiver import Incoming
from shared.telemetry import traces


class Cancelled(Exception):
    """The router does not want the attempt any more; nobody waits for an answer."""


@dataclass(eq=False)
class Attempt:
    """`ready_ns` is 0 until its KV is here; from then on the running batch has it. `first_ns` is 0 until its first token.
    Times are CLOCK_MONOTONIC."""

    sequence: Sequence
    rank: DecodeRank
    prefiller: Announce | None
    context: Context
    admitted_ns: int
    incoming: Incoming | None = None
    compiling: asyncio.Task[None] | None = None
    """Sets the sequence's matcher, or fails the attempt. None: it has no grammar."""
    failure: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ready_ns: int = 0
    first_ns: int = 0

    @property
    def id(self) -> str:
        return self.sequence.attempt

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

    async def unless_failed(self, work: asyncio.Task[None]) -> None:
        """Until `work` ends well, which counts even where a failure came at the same moment: of KV that has arrived no write
        is left that could be waited for. Raises the error of `work`, the failure, or `AttemptFailed` at the deadline."""
        left = self.sequence.deadline - asyncio.get_running_loop().time()
        await asyncio.wait({work, self.failure}, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if (error := self.end()) is not None:
            raise error
        raise AttemptFailed("waiting for KV", "the request's deadline passed", retryable=False)


class Attempts:
    """All that are here, by id. `idle` is set while there are none."""

    def __init__(self, metrics: DecodeMetrics, outbox: Outbox) -> None:
        self._metrics = metrics
        self._outbox = outbox
        self._by_id: dict[str, Attempt] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_id.values()))

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._by_id

    def get(self, attempt_id: str) -> Attempt | None:
        return self._by_id.get(attempt_id)

    def add(self, attempt: Attempt) -> None:
        self._by_id[attempt.id] = attempt
        self.idle.clear()

    def on_rank(self, rank: DecodeRank) -> int:
        """How many."""
        return sum(attempt.rank is rank for attempt in self._by_id.values())

    def of_router(self, router: InstanceRef) -> list[Attempt]:
        return [attempt for attempt in self._by_id.values() if attempt.router == router]

    def finish(self, attempt: Attempt, outcome: str) -> None:
        """It is no more. Idempotent. Its pages are not freed here."""
        if self._by_id.pop(attempt.id, None) is not None:
            self._metrics.attempts.labels(outcome).inc()
            if attempt.first_ns:
                sequence = attempt.sequence
                attributes: traces.Attributes = {
                    "kvmesh.tokens": sequence.emitted,
                    "kvmesh.outcome": outcome,
                    "kvmesh.drafted": sequence.drafted,
                    "kvmesh.accepted": sequence.accepted,
                }
                now = time.monotonic_ns()
                traces.record("decode.stream", attempt.context, attempt.first_ns, now, attributes=attributes)
        if not self._by_id:
            self.idle.set()

    def finish_badly(self, attempt: Attempt, error: AttemptFailed | Cancelled) -> None:
        """The same; the router is told, unless it was the router's own wish."""
        if isinstance(error, Cancelled):
            return self.finish(attempt, "cancelled")
        emitted = attempt.sequence.emitted
        emit = Emit(attempt=attempt.id, index=emitted, error=str(error), retryable=error.retryable)
        self._outbox.add(attempt.router, emit)
        return self.finish(attempt, "failed")
