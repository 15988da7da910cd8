"""What the fabric's tests share: memory, a fabric in this process, and a fabric in another that takes commands."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.errors import FabricError
from shared.transfer.fabric import Fabric, providers
from shared.transfer.handles import Connection, Region
from shared.transfer.interface import PagedWrite, PageGeometry

# The suite runs on each of these that is present. Others that libfabric has are for experiments.
PROVIDERS = [name for name in os.environ.get("KVMESH_FABRIC_PROVIDERS", "tcp,shm").split(",") if name in providers()]
DEADLINE_S = 20.0
HOSTS = {1: "127.0.0.1", 2: "127.0.0.1,127.0.0.2", 3: "127.0.0.1,127.0.0.2,127.0.0.3"}
"""By number of NICs."""
# "A dead peer is noticed in a second or two." A shm peer that was killed while it held a shared lock hangs the provider
# here, and it takes three seconds more to be sure of that.
NOTICED_S = {"tcp": 2.0, "shm": 6.0}


class Memory:
    """A memfd, mapped by the test and registered with one fabric."""

    def __init__(self, fabric: Fabric, length: int) -> None:
        fd = os.memfd_create("kvmesh-test")
        try:
            os.ftruncate(fd, length)
            self.bytes = mmap.mmap(fd, length)
            self.region: Region = fabric.register(fd, length)
        finally:
            os.close(fd)

    @property
    def descriptor(self) -> bytes:
        return self.region.descriptor

    def fill_random(self) -> bytes:
        self.bytes[:] = os.urandom(len(self.bytes))
        return self.bytes[:]


def new_identity() -> int:
    return secrets.randbits(63) + 1


@asynccontextmanager
async def open_fabric(provider: str, **options: Any) -> AsyncIterator[Fabric]:
    options.setdefault("host", "127.0.0.1")
    options.setdefault("identity", new_identity())
    fabric = await Fabric.open(provider=provider, **options)
    try:
        yield fabric
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await fabric.close()


def paged(
    peer: Connection,
    source: Memory,
    target: bytes,
    pages: list[int],
    *,
    page_bytes: int,
    immediate: int,
    target_pages: list[int] | None = None,
    layers: int = 1,
    source_stride: int = 0,
    target_stride: int = 0,
    timeout_s: float = DEADLINE_S,
) -> PagedWrite:
    """Whole pages, as large on the one side as on the other."""
    geometry = PageGeometry(
        run_bytes=page_bytes,
        source_offset=0,
        target_offset=0,
        source_page_stride=page_bytes,
        target_page_stride=page_bytes,
        source_layer_stride=source_stride,
        target_layer_stride=target_stride,
        num_layers=layers,
    )
    return PagedWrite(
        peer=peer,
        source=source.region,
        source_pages=pages,
        target=target,
        target_pages=pages if target_pages is None else target_pages,
        geometry=geometry,
        immediate=immediate,
        timeout_s=timeout_s,
    )


class LostPeers:
    """Collects what `on_peer_lost` says."""

    def __init__(self, fabric: Fabric) -> None:
        self.seen: list[tuple[int, FabricError]] = []
        self._noticed_s = NOTICED_S.get(fabric.provider, 2.0)
        self._changed = asyncio.Event()
        fabric.on_peer_lost(self._add)

    def _add(self, identity: int, error: FabricError) -> None:
        self.seen.append((identity, error))
        self._changed.set()

    async def wait(self, identity: int) -> FabricError:
        async with asyncio.timeout(self._noticed_s):
            while True:
                for seen, error in self.seen:
                    if seen == identity:
                        return error
                self._changed.clear()
                await self._changed.wait()


class RemoteError(Exception):
    """A command failed in the other process; `kind` is the exception's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class OtherProcess:
    """A fabric in a process of its own (`fabric_peer`), driven over its standard streams."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            reply = json.loads(line)
            future = self._replies.pop(reply["id"])
            if future.done():
                continue
            if "error" in reply:
                future.set_exception(RemoteError(*reply["error"]))
            else:
                future.set_result(reply["result"])
        for future in self._replies.values():
            future.cancel()

    def start(self, operation: str, **arguments: Any) -> asyncio.Future[Any]:
        """Sends a command; the future is its reply."""
        assert self._process.stdin is not None
        self._next += 1
        future = self._replies[self._next] = asyncio.get_running_loop().create_future()
        line = json.dumps({"id": self._next, "operation": operation, "arguments": arguments})
        self._process.stdin.write(line.encode() + b"\n")
        return future

    async def call(self, operation: str, **arguments: Any) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await self.start(operation, **arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stopped(self) -> None:
        """Until a SIGSTOP has taken effect: signals act when the process is next scheduled."""
        async with asyncio.timeout(DEADLINE_S):
            while self._state() not in "Tt":  # noqa: ASYNC110 - the kernel has no event for it
                await asyncio.sleep(0)

    def _state(self) -> str:
        with open(f"/proc/{self._process.pid}/stat") as file:
            return file.read().rpartition(") ")[2][0]

    async def end(self) -> None:
        """However it is doing: end it and reap it."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reader


@asynccontextmanager
async def other_process(provider: str, *, length: int, **options: Any) -> AsyncIterator[OtherProcess]:
    """Opens a fabric there, with `length` bytes registered under the name "memory"."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.wire.fabric_peer",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    other = OtherProcess(process)
    try:
        await other.call("open", provider=provider, length=length, options=options)
        yield other
    finally:
        await other.end()
