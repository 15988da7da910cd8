"""A fabric in one process, by hand: an implementation of `shared.transfer.interface` whose writes happen when a test says so."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.errors import FabricError, PeerLost, PeerUnreachable, RemoteAccessError, TransferCancelled
from shared.transfer.interface import LayerTiming, PagedWrite, TransferReport


@dataclass(eq=False)
class FakePeer:
    identity: int
    fabric: FakeFabric


@dataclass(eq=False)
class FakeGrant:
    descriptor: bytes
    offset: int
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class FakeRegion:
    memory: mmap.mmap
    length: int
    descriptor: bytes
    closed: bool = False
    grants: list[FakeGrant] = field(default_factory=list)

    def grant(self, offset: int, length: int) -> FakeGrant:
        self.grants.append(FakeGrant(self.descriptor, offset))
        return self.grants[-1]

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class FakeArrival:
    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    def count(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.done.set()

    async def wait(self) -> None:
        await self.done.wait()

    def close(self) -> None:
        self.closed = True


class FakeTransfer:
    """`land()` does what is left of it; `cancel()` ends it."""

    def __init__(self, writes: list[Callable[[], None]], size: int) -> None:
        self.writes = writes
        self._report = TransferReport(len(writes), size, [LayerTiming(1, 2)])
        self.future: asyncio.Future[TransferReport] = asyncio.get_running_loop().create_future()
        if not writes:
            self.land()

    def land(self) -> None:
        while self.writes:
            self.writes.pop(0)()
        if not self.future.done():
            self.future.set_result(self._report)

    def cancel(self) -> None:
        self.fail(TransferCancelled("cancelled"))

    def fail(self, error: FabricError) -> None:
        self.writes.clear()
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()

    async def wait(self) -> TransferReport:
        return await asyncio.shield(self.future)


class FakeWatcher:
    def __init__(self, fabric: FakeFabric) -> None:
        self.fabric = fabric
        self.plans: list[tuple[int, list[FakeTransfer]]] = []

    def arm(self, first: int, writes: Sequence[PagedWrite]) -> list[FakeTransfer]:
        transfers = [self.fabric.write_pages(write) for write in writes]
        self.plans.append((first, transfers))
        return transfers

    def disarm(self) -> None:
        for _, transfers in self.plans:
            for transfer in transfers:
                transfer.cancel()

    def close(self) -> None:
        pass


def _require_inside(side: str, region: FakeRegion, begin: int, offset: int, page_stride: int, size: int) -> None:
    if begin + size > region.length:
        raise RemoteAccessError(f"the write ends past its {side} region of {region.length} bytes")
    if offset + size > page_stride:
        raise RemoteAccessError(f"the run ends past its {side} page of {page_stride} bytes")


class FakeFabric:
    """All fabrics of one `network` reach one another by address."""

    provider = "fake"
    stuck = False
    make_transfer: type[FakeTransfer] = FakeTransfer

    def __init__(self, identity: int, network: dict[bytes, FakeFabric]) -> None:
        self.identity = identity
        self.address = identity.to_bytes(8, "big")
        self.network = network
        self.network[self.address] = self
        self.regions: dict[bytes, FakeRegion] = {}
        self.arrivals: dict[int, FakeArrival] = {}
        self.fenced: list[int] = []
        self.transfers: list[FakeTransfer] = []
        self.callbacks: list[Callable[[int, FabricError], None]] = []

    def register(self, fd: int, length: int) -> FakeRegion:
        descriptor = self.address + len(self.regions).to_bytes(4, "big")
        region = FakeRegion(mmap.mmap(fd, length), length, descriptor)
        self.regions[descriptor] = region
        return region

    def memory(self, length: int) -> FakeRegion:
        fd = os.memfd_create("test")
        os.ftruncate(fd, length)
        region = self.register(fd, length)
        os.close(fd)
        return region

    async def connect(self, address: bytes, *, timeout_s: float) -> FakePeer:
        if address not in self.network:
            raise PeerUnreachable(f"nobody at {address.hex()} within {timeout_s:g} s")
        other = self.network[address]
        return FakePeer(other.identity, other)

    def expect(self, immediate: int, count: int) -> FakeArrival:
        assert immediate not in self.arrivals or self.arrivals[immediate].closed, "the immediate is still armed"
        self.arrivals[immediate] = FakeArrival(count)
        if count == 0:
            self.arrivals[immediate].done.set()
        return self.arrivals[immediate]

    def write(self, peer, source, source_offset, target, target_offset, length, immediate, *, timeout_s):
        def land() -> None:
            there = peer.fabric.regions[target].memory
            there[target_offset : target_offset + length] = source.memory[source_offset : source_offset + length]
            peer.fabric.arrivals[immediate].count()

        return self._track(self.make_transfer([land], length))

    def write_pages(self, write: PagedWrite) -> FakeTransfer:
        geometry, peer = write.geometry, write.peer
        size, there = geometry.run_bytes, peer.fabric.regions[write.target]
        writes = []
        for layer in range(geometry.num_layers):
            for source_page, target_page in zip(write.source_pages, write.target_pages, strict=True):
                a = layer * geometry.source_layer_stride + source_page * geometry.source_page_stride
                b = layer * geometry.target_layer_stride + target_page * geometry.target_page_stride
                a += geometry.source_begin + geometry.source_offset
                b += geometry.target_begin + geometry.target_offset
                _require_inside("source", write.source, a, geometry.source_offset, geometry.source_page_stride, size)
                _require_inside("target", there, b, geometry.target_offset, geometry.target_page_stride, size)

                def land(a: int = a, b: int = b) -> None:
                    there.memory[b : b + size] = write.source.memory[a : a + size]
                    peer.fabric.arrivals[write.immediate].count()

                writes.append(land)
        return self._track(self.make_transfer(writes, len(writes) * size))

    def watch(self, counter_fd: int) -> FakeWatcher:
        return FakeWatcher(self)

    async def fence(self, identity: int) -> None:
        self.fenced.append(identity)
        for other in self.network.values():
            if other.identity == identity:
                for transfer in other.transfers:
                    transfer.fail(PeerLost("fenced"))

    def on_peer_lost(self, callback: Callable[[int, FabricError], None]) -> None:
        self.callbacks.append(callback)

    async def close(self) -> None:
        pass

    def _track(self, transfer: FakeTransfer) -> FakeTransfer:
        self.transfers.append(transfer)
        return transfer
