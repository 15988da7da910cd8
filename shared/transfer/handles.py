"""What the fabric hands out: regions, peers, and operations that end later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from shared.errors import FabricError, FabricUnavailable, PeerLost
from shared.transfer import _native
from shared.transfer.faults import mapped
from shared.transfer.interface import LayerTiming, TransferReport


class Region:
    """A `MemoryRegion`: a memfd mapped here and registered."""

    def __init__(self, owner: _native.Fabric, native: _native.Region) -> None:
        self._owner, self.native = owner, native
        self._open = True
        self._descriptor = native.descriptor

    @property
    def length(self) -> int:
        return self.native.length

    @property
    def descriptor(self) -> bytes:
        return self._descriptor

    def grant(self, offset: int, length: int) -> Grant:
        """On `tcp` and `shm` a registration of its own, under random keys. On `verbs` and `efa` each registration pins and
        maps the memory, which takes longer than many a transfer: there the region's own key stands in, the fence alone
        keeps later writes out, and `close` does nothing."""
        if not self._owner.grants:
            return Grant(self._owner, None, self._descriptor, offset)
        with mapped():
            native = self._owner.grant(self.native, offset, length)
        return Grant(self._owner, native, native.descriptor, 0)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with mapped():
            self._owner.unregister(self.native)


class Grant:
    """A `MemoryGrant`."""

    def __init__(self, owner: _native.Fabric, native: _native.Region | None, descriptor: bytes, offset: int) -> None:
        self._owner, self._native = owner, native
        self.descriptor = descriptor
        self.offset = offset

    def close(self) -> None:
        native, self._native = self._native, None
        if native is None:
            return
        # A provider that hangs has no keys to take back: whoever owns the fabric is told by `stuck`.
        with suppress(FabricUnavailable), mapped():
            self._owner.unregister(native)


class Connection:
    """A `Peer`: one lane. `lost` is why it can no longer be used."""

    def __init__(self, identity: int, lane: int) -> None:
        self._identity, self._lane = identity, lane
        self.lost: str | None = None

    @property
    def identity(self) -> int:
        return self._identity

    @property
    def lane(self) -> int:
        """The native lane. Raises `PeerLost` once the connection is gone."""
        if self.lost is not None:
            raise PeerLost(self.lost, call="lane", peer=self._identity)
        return self._lane


class Pending:
    """An operation's end. The future never carries an exception, so that one nobody waits for is not reported."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[FabricError | None] = loop.create_future()

    @property
    def done(self) -> bool:
        return self._future.done()

    def end(self, error: FabricError | None) -> None:
        if not self._future.done():
            self._future.set_result(error)

    async def outcome(self) -> None:
        """Until the end. Raises what ended it; cancelling a waiter leaves the operation alone."""
        error = await asyncio.shield(self._future)
        if error is not None:
            raise error


class Writes:
    """A `Transfer`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: int, cancel: Callable[[], None]) -> None:
        self._pending = Pending(loop)
        self._cancel = cancel
        self._report = TransferReport(writes=0, bytes=0, layers=[])
        self.peer = peer

    @property
    def done(self) -> bool:
        return self._pending.done

    @property
    def report(self) -> TransferReport:
        """What has been done; whole once `done`, also after a failure."""
        return self._report

    def end(self, event: _native.Event, error: FabricError | None) -> None:
        layers = [LayerTiming(posted, completed) for posted, completed in event.layers]
        self._report = TransferReport(writes=event.writes, bytes=event.bytes, layers=layers)
        self._pending.end(error)

    def abandon(self, error: FabricError) -> None:
        self._pending.end(error)

    async def wait(self) -> TransferReport:
        await self._pending.outcome()
        return self._report

    def cancel(self) -> None:
        if not self._pending.done:
            self._cancel()


class Counter:
    """An `Arrival`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, immediate: int, forget: Callable[[], None]) -> None:
        self._pending = Pending(loop)
        self._forget = forget
        self._open = True
        self.immediate = immediate

    @property
    def done(self) -> bool:
        return self._pending.done

    def end(self, error: FabricError | None) -> None:
        self._pending.end(error)

    async def wait(self) -> None:
        await self._pending.outcome()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._forget()
        # Whoever still waits for it learns that it will never come.
        self._pending.end(FabricError(f"the counter of immediate {self.immediate} was disarmed", call="expect"))
