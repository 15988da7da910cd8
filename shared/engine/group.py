"""The executors of one instance, seen from its main process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from shared.engine.client import Executor, ExecutorConfig, Rank
from shared.engine.collective import create_memory
from shared.engine.protocol import Started, Step, StepDone, StepError
from shared.errors import EngineError, ExecutorDied, StepTimeout
from shared.layout import KvLayout
from shared.models.config import load_config
from shared.models.shard import sharded_layout

STOPPED_S = 2.0
"""An executor that is stopped (SIGSTOP) for so long is ended: those who wait for it know at once what else a step's deadline
would tell them much later."""
_LOOK_S = 0.5

log = logging.getLogger(__name__)


class ExecutorGroup:
    """Loaded executors, one a rank, a `shared.engine.interface.StepRunner`; made by `ExecutorGroup.start` alone.

    When one ends, the others are ended at once, and every step raises `ExecutorDied`, which names the first; likewise
    after `StepTimeout`.
    """

    def __init__(self, executors: Sequence[Executor], lead: Rank) -> None:
        self._executors, self._tp = executors, lead.tp
        self._spreads_experts = lead.expert_fd is not None
        self._failure: asyncio.Future[ExecutorDied] = asyncio.get_running_loop().create_future()
        self._watchers = [asyncio.ensure_future(self._watch(rank)) for rank in range(len(executors))]
        self._watchers.append(asyncio.ensure_future(self._watch_stopped()))
        self._round: asyncio.Future[list[StepDone | StepError | BaseException]] | None = None
        self._running = False

    @classmethod
    @asynccontextmanager
    async def start(cls, config: ExecutorConfig, tp: int = 1, dp: int = 1) -> AsyncIterator[ExecutorGroup]:
        """`tp * dp` executors, started together and closed on leaving. `config.layout` is the whole model's; `num_pages` and
        `threads` are each rank's. With `dp` above 1 a mixture of experts is spread over all ranks. Raises as
        `Executor.start` does, and `ModelError` for a model that cannot be split so."""
        own = msgspec.structs.replace(config, layout=sharded_layout(config.layout, tp))
        async with AsyncExitStack() as stack:
            places = _places(stack, tp, dp, ep=_expert_parallel(config.model, tp, dp))
            entered = [stack.enter_async_context(Executor.start(own, place)) for place in places]
            group = cls(await _all(entered), places[0])
            stack.push_async_callback(group.close)
            yield group

    @property
    def tp(self) -> int:
        return self._tp

    @property
    def dp(self) -> int:
        return len(self._executors) // self._tp

    @property
    def ep(self) -> int:
        """Expert parallel: the ranks that the routed experts are spread over, all or, where each has them, 1."""
        return len(self._executors) if self._spreads_experts else 1

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
        """Rank 0's layer counter: it counts a layer when its tensor parallel group has written its K and V."""
        return self._executors[0].counter_fd

    @property
    def started(self) -> list[Started]:
        """What each rank said when it had loaded."""
        return [executor.started for executor in self._executors]

    @property
    def pids(self) -> list[int]:
        return [executor.pid for executor in self._executors]

    async def died(self) -> None:
        """Raises `ExecutorDied` as soon as a rank has ended, for whatever reason; never returns."""
        raise await asyncio.shield(self._failure)

    async def step(self, steps: Sequence[Step], *, timeout_s: float) -> list[StepDone | StepError]:
        """As `StepRunner.step`; returns once all ranks have answered. Raises `EngineError` where a step runs already.

        Cancelling it does not stop the step: the next call waits first, in its own time, for the answers, and drops them.
        """
        if self._running:
            raise EngineError(f"step {steps[0].step} while another one runs")
        self._running = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._drop_cancelled()
                replies = await self._exchange(steps)
        except TimeoutError:
            self._kill()
            raise StepTimeout(steps[0].step, timeout_s) from None
        finally:
            self._running = False
        return await self._answers(replies)

    async def close(self) -> None:
        """End all ranks. Idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(executor.close() for executor in self._executors))
        if not self._failure.done():
            self._failure.set_result(ExecutorDied(await self._executors[0].exited(), "closed"))
        if self._round is not None:
            await self._round

    async def _exchange(self, steps: Sequence[Step]) -> list[StepDone | StepError | BaseException]:
        """Shielded as a whole: a caller that is cancelled never leaves a step that some ranks were sent and some not."""
        each = zip(self._executors, (step for step in steps for _ in range(self._tp)), strict=True)
        self._round = asyncio.gather(*(executor.step(step) for executor, step in each), return_exceptions=True)
        replies = await asyncio.shield(self._round)
        self._round = None
        return replies

    async def _drop_cancelled(self) -> None:
        if self._round is not None:
            await asyncio.shield(self._round)
            self._round = None

    async def _answers(self, replies: Sequence[StepDone | StepError | BaseException]) -> list[StepDone | StepError]:
        """Of each data parallel rank that of its first rank, or of the first one where the step failed."""
        answers = []
        for reply in replies:
            if isinstance(reply, ExecutorDied):
                raise await asyncio.shield(self._failure)
            if isinstance(reply, BaseException):
                raise reply
            answers.append(reply)
        groups = [answers[first : first + self._tp] for first in range(0, len(answers), self._tp)]
        return [next((one for one in group if isinstance(one, StepError)), group[0]) for group in groups]

    async def _watch(self, rank: int) -> None:
        status = await self._executors[rank].exited()
        if not self._failure.done():
            self._failure.set_result(ExecutorDied(status, f"rank {rank} of {len(self._executors)}"))
            self._kill()

    async def _watch_stopped(self) -> None:
        """Until cancelled. Looks are counted, not time: where this process was stopped too, nothing is concluded from it."""
        looks = [0] * len(self._executors)
        while True:
            await asyncio.sleep(_LOOK_S)
            for rank, executor in enumerate(self._executors):
                looks[rank] = looks[rank] + 1 if executor.stopped else 0
                if looks[rank] == int(STOPPED_S / _LOOK_S):
                    log.error("rank %d of %d is stopped: it is ended", rank, len(self._executors))
                    executor.kill()

    def _kill(self) -> None:
        for executor in self._executors:
            executor.kill()


async def _all(entered: Sequence[Awaitable[Executor]]) -> list[Executor]:
    """All results; where one raises, the others are cancelled and waited for first."""
    tasks = [asyncio.ensure_future(one) for one in entered]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _expert_parallel(model: str, tp: int, dp: int) -> int:
    return tp * dp if dp > 1 and load_config(Path(model)).experts else 1


def _places(stack: AsyncExitStack, tp: int, dp: int, *, ep: int) -> list[Rank]:
    """Of all ranks; the memory they share is closed with `stack`."""
    groups = [_shared_memory(stack, tp) if tp > 1 else None for _ in range(dp)]
    experts = _shared_memory(stack, ep) if ep > 1 else None
    return [Rank(rank=i, tp=tp, dp=dp, tensor_fd=groups[i // tp], expert_fd=experts) for i in range(tp * dp)]


def _shared_memory(stack: AsyncExitStack, ranks: int) -> int:
    fd = create_memory(ranks)
    stack.callback(os.close, fd)
    return fd
