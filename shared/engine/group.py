"""The executors of one tensor parallel instance, seen from its main process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from shared.engine.client import Executor, ExecutorConfig, Rank
from shared.engine.collective import create_memory
from shared.engine.protocol import Step, StepDone
from shared.errors import EngineError, ExecutorDied, StepTimeout
from shared.layout import KvLayout
from shared.models.shard import sharded_layout


class ExecutorGroup:
    """Loaded executors, one a rank, that run the same steps; made by `ExecutorGroup.start` alone. One step at a time.

    When one ends, the others are ended at once, and every step raises `ExecutorDied`, which names the first; likewise
    after `StepTimeout`.
    """

    def __init__(self, executors: Sequence[Executor]) -> None:
        self._executors = executors
        self._failure: asyncio.Future[ExecutorDied] = asyncio.get_running_loop().create_future()
        self._watchers = [asyncio.ensure_future(self._watch(rank)) for rank in range(len(executors))]
        self._round: asyncio.Future[list[StepDone | BaseException]] | None = None
        self._running = False

    @classmethod
    @asynccontextmanager
    async def start(cls, config: ExecutorConfig, ranks: int) -> AsyncIterator[ExecutorGroup]:
        """`ranks` executors, started together and closed on leaving. `config.layout` is the whole model's; `num_pages` and
        `threads` are each rank's. Raises as `Executor.start` does, and `ModelError` for a layout that cannot be split."""
        own = msgspec.structs.replace(config, layout=sharded_layout(config.layout, ranks))
        async with AsyncExitStack() as stack:
            fd = create_memory(ranks)
            stack.callback(os.close, fd)
            places = [Rank(rank=rank, ranks=ranks, collective_fd=fd) for rank in range(ranks)]
            entered = [stack.enter_async_context(Executor.start(own, place)) for place in places]
            group = cls(await _all(entered))
            stack.push_async_callback(group._close)
            yield group

    @property
    def layout(self) -> KvLayout:
        """Of each rank's region."""
        return self._executors[0].config.layout

    @property
    def kv_fds(self) -> list[int]:
        """The memfd of each rank's KV region, `kv_bytes` long; owned by this object."""
        return [executor.kv_fd for executor in self._executors]

    @property
    def kv_bytes(self) -> int:
        """Of one region."""
        return self._executors[0].kv_bytes

    @property
    def counter_fd(self) -> int:
        """Rank 0's layer counter: it counts a layer when all ranks have written their K and V."""
        return self._executors[0].counter_fd

    @property
    def pids(self) -> list[int]:
        return [executor.pid for executor in self._executors]

    async def died(self) -> None:
        """Raises `ExecutorDied` as soon as a rank has ended, for whatever reason; never returns."""
        raise await asyncio.shield(self._failure)

    async def step(self, step: Step, *, timeout_s: float) -> StepDone:
        """Run one step in all ranks; rank 0's answer, once all have answered. Raises what `Executor.step` raises.

        Cancelling it does not stop the step: the next call waits first, in its own time, for the answers, and drops them.
        """
        if self._running:
            raise EngineError(f"step {step.step} while another one runs")
        self._running = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drop_cancelled()
                replies = await self._exchange(step, timeout_s)
        except TimeoutError:
            self._kill()
            raise StepTimeout(step.step, timeout_s) from None
        finally:
            self._running = False
        return await self._lead(replies)

    async def _exchange(self, step: Step, timeout_s: float) -> list[StepDone | BaseException]:
        """Shielded as a whole: a caller that is cancelled never leaves a step that some ranks were sent and some not."""
        steps = [executor.step(step, timeout_s=timeout_s) for executor in self._executors]
        self._round = asyncio.gather(*steps, return_exceptions=True)
        replies = await asyncio.shield(self._round)
        self._round = None
        return replies

    async def _drop_cancelled(self) -> None:
        if self._round is not None:
            await asyncio.shield(self._round)
            self._round = None

    async def _lead(self, replies: list[StepDone | BaseException]) -> StepDone:
        """Rank 0's answer, unless some rank has ended."""
        for kind in (StepTimeout, ExecutorDied, BaseException):
            for reply in replies:
                if isinstance(reply, ExecutorDied):
                    raise await asyncio.shield(self._failure)
                if isinstance(reply, kind):
                    raise reply
        lead = replies[0]
        assert isinstance(lead, StepDone)
        return lead

    async def _watch(self, rank: int) -> None:
        status = await self._executors[rank].exited()
        if not self._failure.done():
            self._failure.set_result(ExecutorDied(status, f"rank {rank} of {len(self._executors)}"))
            self._kill()

    def _kill(self) -> None:
        for executor in self._executors:
            executor.kill()

    async def _close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(executor.close() for executor in self._executors))
        if self._round is not None:
            await self._round


async def _all(entered: Sequence[Awaitable[Executor]]) -> list[Executor]:
    """All results; where one raises, the others are cancelled and waited for first."""
    tasks = [asyncio.ensure_future(one) for one in entered]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
