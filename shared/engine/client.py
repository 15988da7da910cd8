"""An executor process, seen from an instance's main process. Imports no torch and no model."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import msgspec

from shared.engine import frames
from shared.engine.counter import create_counter
from shared.engine.process import ChildProcess
from shared.engine.protocol import Drafter, FromExecutor, Start, Started, StartFailed, Step, StepDone, StepError, Stop
from shared.errors import EngineError, ExecutorDied, ModelError
from shared.kv.region import KvRegion
from shared.layout import KvLayout

_decoder = msgspec.msgpack.Decoder(FromExecutor)


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor runs. `model`: a directory, already resolved. `threads`: CPU threads of its kernels."""

    model: str
    layout: KvLayout
    num_pages: int
    threads: int = 1
    weights_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    purpose: Literal["prefill", "decode", "mixed"] = "mixed"
    drafter: Drafter = "none"
    draft_model: str = ""
    """As in `Start`."""
    load_timeout_s: float = 300.0
    stop_grace_s: float = 2.0


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """An executor's place among the `tp * dp` of its instance. `tensor_fd`, `expert_fd`: as in `Start`; their owner's to
    close."""

    rank: int = 0
    tp: int = 1
    dp: int = 1
    tensor_fd: int | None = None
    expert_fd: int | None = None


class Executor:
    """One rank of a `shared.engine.group.ExecutorGroup`, loaded; made by `Executor.start` alone. One step at a time.

    After `ExecutorDied` or `close` every further step raises `ExecutorDied`.
    """

    def __init__(self, config: ExecutorConfig, rank: Rank) -> None:
        self.config, self._rank = config, rank
        self._region = KvRegion(config.layout.region_bytes(config.num_pages))
        self._counter_fd = create_counter()
        self._process: ChildProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._started: Started | None = None
        self._in_step = False
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def start(cls, config: ExecutorConfig, rank: Rank) -> AsyncIterator[Executor]:
        """Region, process, loaded model; closed on leaving. `config.layout` is this rank's. Raises `ModelError` with the
        executor's words where the model cannot be loaded, `ExecutorDied` where it ends, `EngineError` where it is not ready
        in `load_timeout_s`."""
        executor = cls(config, rank)
        try:
            await executor._spawn()
            await executor._load()
            yield executor
        finally:
            closing = asyncio.ensure_future(executor.close())
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing  # also when cancelled while it closes: nobody else would wait for the process
                raise

    @property
    def kv_fd(self) -> int:
        """The KV region's memfd, `kv_bytes` long; owned by this object, open until `close`."""
        return self._region.fd

    @property
    def kv_bytes(self) -> int:
        return self._region.nbytes

    @property
    def counter_fd(self) -> int:
        """The layer counter's memfd (`shared.engine.counter`); owned by this object, open until `close`."""
        return self._counter_fd

    @property
    def started(self) -> Started:
        if self._started is None:
            raise EngineError("the executor has not started")
        return self._started

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def stopped(self) -> bool:
        """See `ChildProcess.stopped`."""
        return self._child.stopped

    def kill(self) -> None:
        """End the process at once; every step raises `ExecutorDied` then."""
        self._child.kill()

    async def exited(self) -> int:
        """The exit status of the process, as soon as it has ended, for whatever reason."""
        return await self._child.exited()

    async def step(self, step: Step) -> StepDone | StepError:
        """Run one step: its answer, however long that takes. Raises `ExecutorDied`. Not to be cancelled: an answer would be
        left without a reader."""
        self._in_step = True
        await self._send(step)
        answer = await self._receive()
        if not isinstance(answer, StepDone | StepError) or answer.step != step.step:
            raise EngineError(f"the executor answered step {step.step} with {answer!r}")
        self._in_step = False
        return answer

    async def close(self) -> None:
        """Stop the process, by force where it does not stop by itself, and close what this object owns. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._process is not None:
                await self._stop(self._process)
        finally:
            self._region.close()
            os.close(self._counter_fd)

    @property
    def _child(self) -> ChildProcess:
        if self._process is None:
            raise EngineError("the executor has not started")
        return self._process

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "shared.engine.executor", "--fd", str(theirs.fileno())]
            environ = dict(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            shared = (self._rank.tensor_fd, self._rank.expert_fd)
            fds = (theirs.fileno(), self.kv_fd, self.counter_fd, *(fd for fd in shared if fd is not None))
            try:
                self._process = ChildProcess([*command, "--parent", str(os.getpid())], pass_fds=fds, environ=environ)
                self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            except BaseException:
                ours.close()
                raise

    async def _load(self) -> None:
        c = self.config
        start = Start(
            model=c.model,
            weights_dtype=c.weights_dtype,
            layout=c.layout,
            num_pages=c.num_pages,
            threads=c.threads,
            purpose=c.purpose,
            kv_fd=self.kv_fd,
            counter_fd=self.counter_fd,
            drafter=c.drafter,
            draft_model=c.draft_model,
            rank=self._rank.rank,
            tp=self._rank.tp,
            dp=self._rank.dp,
            tensor_fd=self._rank.tensor_fd,
            expert_fd=self._rank.expert_fd,
        )
        try:
            async with asyncio.timeout(c.load_timeout_s):
                await self._send(start)
                answer = await self._receive()
        except TimeoutError:
            raise EngineError(f"the executor was not ready within {c.load_timeout_s:g} s") from None
        if isinstance(answer, StartFailed):
            raise ModelError(answer.detail)
        if not isinstance(answer, Started):
            raise EngineError(f"the executor answered its start with {answer!r}")
        self._started = answer

    async def _send(self, message: Start | Step | Stop) -> None:
        if self._writer is None or self._closed:
            raise ExecutorDied(self._child.status, "closed")
        try:
            self._writer.write(frames.pack(message))
            await self._writer.drain()
        except (ConnectionError, RuntimeError):
            raise await self._death() from None

    async def _receive(self) -> FromExecutor:
        if self._reader is None:
            raise EngineError("the executor has not started")
        try:
            header = await self._reader.readexactly(frames.HEADER_BYTES)
            return _decoder.decode(await self._reader.readexactly(frames.body_bytes(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._death() from None

    async def _death(self) -> ExecutorDied:
        """Its connection is gone, so the process has ended or is about to."""
        return ExecutorDied(await self._child.end(self.config.stop_grace_s))

    async def _stop(self, process: ChildProcess) -> None:
        if self._writer is not None:
            if process.status is None and not self._in_step:
                self._writer.write(frames.pack(Stop()))
            self._writer.close()
        await process.end(self.config.stop_grace_s)
