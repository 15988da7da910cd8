"""A job with its task: the part that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from opentelemetry.context import Context

from services.prefill.job import Job
from services.prefill.metrics import PrefillMetrics
from services.prefill.overlap import Interval
from shared.errors import KvmeshError
from shared.messenger.sender import Outgoing

T = TypeVar("T")


class Cancelled(KvmeshError):
    """The decoder does not want the attempt any more."""


class Running:
    """`computed`: the last chunk is done. `drained`: no write of it can land any more. `out_of_step`: no forward uses its
    pages now."""

    def __init__(self, job: Job, context: Context) -> None:
        self.job = job
        self.context = context
        self.task: asyncio.Task[None] | None = None
        self.outgoing: Outgoing | None = None
        self.sent = False
        self.accepted_ns = time.monotonic_ns()
        self.started_ns = 0
        self.hidden = b""
        """Of the last chunk's last token, where the decoder's drafter wants it."""
        self.forwards: list[Interval] = []
        self.computed = asyncio.Event()
        self.drained = asyncio.Event()
        self.out_of_step = asyncio.Event()
        self.out_of_step.set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def has_failed(self) -> bool:
        return self._failure.done()

    def reason(self) -> BaseException | None:
        return self._failure.exception() if self._failure.done() else None

    def fail(self, error: KvmeshError) -> None:
        """Ends whatever it waits for. Only the first failure counts."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # it may come when nobody waits any more: that is not an error of the program

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which counts even where a failure came at the same moment; otherwise raises the failure as
        soon as there is one, with `work` cancelled."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_seen)
        either: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failure.result()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def enter_step(self, now_ns: int, metrics: PrefillMetrics) -> None:
        self.out_of_step.clear()
        if not self.started_ns:
            self.started_ns = now_ns
            metrics.queue.observe((now_ns - self.accepted_ns) / 1e9)


def _seen(task: asyncio.Future[Any]) -> None:
    """It may fail in the moment in which something else ends the wait: the first failure is the one that counts, and the other
    is not an error of the program."""
    if not task.cancelled():
        task.exception()
