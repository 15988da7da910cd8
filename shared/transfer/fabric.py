"""The asyncio face of the native fabric: `interface.Fabric` over libfabric.

    fabric = await Fabric.open(provider="tcp", host="10.0.0.7", identity=incarnation)
    region = fabric.register(memfd, length)
    arrival = fabric.expect(immediate, count)            # the target, before it says so to anybody
    peer = await fabric.connect(their_address, timeout_s=5)   # the initiator
    await fabric.write(peer, region, 0, their_descriptor, 0, length, immediate, timeout_s=5).wait()

Native threads do all the work. What has ended reaches the event loop through one eventfd, in batches.

What an error means for the connection. `TransferCancelled` and a `TransferTimeout` whose posted writes drained within
a quarter of a second leave it as it is. Posted writes cannot be taken back: when they do not drain, and after a
`RemoteAccessError` (a stream provider breaks the connection over it), the connection is closed on both sides and
everything else outstanding on it ends as `PeerLost`; `connect` makes a new one. A peer that does not confirm within a
second that its side is closed has stopped, and whatever its kernel holds is for its own fence to keep out.

`tcp` is libfabric's native TCP provider: `net` in 1.17, `tcp` since 1.18. `shm` protects little: it looks at neither
ranges nor revoked keys, and a forged key never completes, so that the write ends as `TransferTimeout`. For trusted peers
on one host only, and only with libfabric 1.x: that of 2.x cannot be closed safely while it is busy. Its peers share
locks: one that is killed while it holds one hangs the other's engine for good. That is noticed within seconds: the peer
is lost, calls raise `FabricUnavailable`, `close` returns, and only a new process has a fabric again.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from shared.errors import FabricError, FabricUnavailable, PeerLost, PeerUnreachable
from shared.transfer import _native
from shared.transfer.faults import event_error, mapped
from shared.transfer.handles import Connection, Counter, Pending, Region, Writes
from shared.transfer.interface import LayerWatcher, MemoryRegion, PagedWrite, Peer
from shared.transfer.topology import NicGroup
from shared.transfer.watcher import Watcher

TRANSFER, ARRIVAL, CONNECTED, FENCED, PEER_LOST = range(5)
WINDOW = 64
_HOST = re.compile(r"[0-9A-Za-z_.:%-]{1,255}")


def providers() -> list[str]:
    """The providers on this machine that can write with an immediate, as `Fabric.open` takes them."""
    return _native.providers()


def library_version() -> str:
    """The version of libfabric that runs."""
    return _native.library_version()


class Fabric:
    """One process's fabric. Made by `open`; everything is called from the thread of the loop that opened it."""

    def __init__(self, native: _native.Fabric, provider: str, loop: asyncio.AbstractEventLoop) -> None:
        self._native, self._provider, self._loop = native, provider, loop
        self._transfers: dict[int, Writes] = {}
        self._arrivals: dict[int, Counter] = {}
        self._connects: dict[int, asyncio.Future[Connection | FabricError]] = {}
        self._fences: dict[int, Pending] = {}
        self._connections: dict[int, Connection] = {}  # by lane
        self._lost_callbacks: list[Callable[[int, FabricError], None]] = []
        self._closing: asyncio.Task[None] | None = None
        loop.add_reader(native.event_fd, self._drain)

    @classmethod
    async def open(
        cls,
        *,
        provider: str,
        host: str,
        identity: int,
        groups: Sequence[NicGroup] = (),
        spin: bool | None = None,
        window: int = WINDOW,
    ) -> Self:
        """`provider` is "tcp", "shm" or "libfabric:<name>". `host` is this machine as peers reach it: a name or address
        of an interface here; the first is bound, and becomes part of `address`. Several, separated by commas, are as many
        NICs, in one group. `groups`: the NICs instead, by device or address, a progress thread each. `identity` is the
        process's incarnation, not 0. `spin`: the progress threads poll without sleeping and take a whole core each; None:
        on verbs and efa only. `window`: writes outstanding per peer and NIC. Raises `FabricUnavailable`."""
        loop = asyncio.get_running_loop()
        hosts = [part.strip() for part in host.split(",")]
        numerics = [await _interface(loop, part) for part in hosts]
        groups = groups or [NicGroup(nics=tuple(numerics))]
        if provider == "shm" and sum(len(group.nics) for group in groups) > 1:
            raise FabricUnavailable("shm has one NIC: name one host", call="nics")
        with mapped():
            native = _native.open(
                provider=provider,
                host=hosts[0],
                numeric_host=numerics[0],
                identity=identity,
                groups=[(group.nics, group.cpus) for group in groups],
                spin=_spins(provider) if spin is None else spin,
                window=window,
            )
        return cls(native, provider, loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def provider(self) -> str:
        return self._provider

    @property
    def address(self) -> bytes:
        """Changes with every fence, and a fenced peer is let in only with one from after its fence: give the current
        one to a peer with each piece of work, so that work from before a fence cannot be done after it."""
        return self._native.address()

    @property
    def stuck(self) -> bool:
        """The provider does not return from a call: this process will not have a working fabric again."""
        return self._native.stuck

    def stats(self) -> _native.Stats:
        with mapped():
            return self._native.stats()

    def register(self, fd: int, length: int) -> Region:
        with mapped():
            return Region(self._native, self._native.register(fd, length))

    async def connect(self, address: bytes, *, timeout_s: float) -> Connection:
        with mapped():
            host, identity = _native.address_host(address).decode(errors="replace"), _native.address_identity(address)
        if not _HOST.fullmatch(host):
            raise PeerUnreachable(f"{host!r} is no name of a host", call="connect", peer=identity)
        start = self._loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                numeric = await _resolve(self._loop, host)
        except (OSError, UnicodeError, TimeoutError) as error:
            raise PeerUnreachable(f"{host} does not resolve: {error}", call="getaddrinfo", peer=identity) from None
        with mapped(identity):
            token = self._native.connect(address, numeric, max(0.0, timeout_s - (self._loop.time() - start)))
        future: asyncio.Future[Connection | FabricError] = self._loop.create_future()
        self._connects[token] = future
        try:
            outcome = await future
        finally:
            self._connects.pop(token, None)
        if isinstance(outcome, FabricError):
            raise outcome
        return outcome

    def expect(self, immediate: int, count: int) -> Counter:
        """While an immediate was armed and closed again, arrivals with it are late ones of that use and are dropped
        until it is armed anew. Raises `FabricError` when it is armed already."""
        with mapped():
            token = self._native.expect(immediate, count)

        def forget() -> None:
            self._arrivals.pop(token, None)
            self._native.forget(immediate, token)

        counter = self._arrivals[token] = Counter(self._loop, immediate, forget)
        return counter

    def write(
        self,
        peer: Peer,
        source: MemoryRegion,
        source_offset: int,
        target: bytes,
        target_offset: int,
        length: int,
        immediate: int,
        *,
        timeout_s: float,
    ) -> Writes:
        with mapped(peer.identity):
            token = self._native.write(
                lane=_connection(peer).lane,
                source=_region(source).native,
                source_offset=source_offset,
                target=target,
                target_offset=target_offset,
                length=length,
                immediate=immediate,
                timeout_s=timeout_s,
            )
        return self._started(token, peer.identity)

    def write_pages(self, write: PagedWrite) -> Writes:
        with mapped(write.peer.identity):
            token = self._native.write_pages(_paged(write))
        return self._started(token, write.peer.identity)

    def watch(self, counter_fd: int, *, poll_s: float = 0.0) -> LayerWatcher:
        """`poll_s` above 0 is for a counter whose writer wakes nobody (CUDA): it is read that often while armed."""

        def arm(first: int, writes: Sequence[PagedWrite]) -> list[Writes]:
            with mapped():
                tokens = self._native.arm(native, first, [_paged(write) for write in writes])
            return [self._started(token, write.peer.identity) for token, write in zip(tokens, writes, strict=True)]

        with mapped():
            native = self._native.watch(counter_fd, int(poll_s * 1e9))
        return Watcher(native, arm)

    async def fence(self, identity: int) -> None:
        with mapped(identity):
            token = self._native.fence(identity)
        pending = self._fences[token] = Pending(self._loop)
        self._mark_lost(identity, "the peer was fenced")
        await pending.outcome()

    def on_peer_lost(self, callback: Callable[[int, FabricError], None]) -> None:
        self._lost_callbacks.append(callback)

    async def close(self) -> None:
        """Watchers, connections (peers are told), the engine, in this order. What is outstanding ends as `PeerLost`."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._loop.run_in_executor(None, self._native.close)
        self._drain()
        self._loop.remove_reader(self._native.event_fd)
        closed = FabricError("the fabric was closed", call="close")
        for counter in list(self._arrivals.values()):
            counter.end(closed)
        self._abandon(None)
        for fence in self._fences.values():
            fence.end(None)
        for connection in self._connections.values():
            connection.lost = connection.lost or "the fabric was closed"
        self._arrivals.clear()
        self._fences.clear()

    def _started(self, token: int, peer: int) -> Writes:
        # Its event cannot have been handled yet: this runs in the loop's thread, which also drains.
        writes = Writes(self._loop, peer, lambda: self._native.cancel(token))
        self._transfers[token] = writes
        return writes

    def _drain(self) -> None:
        for event in self._native.poll():
            self._handle(event)

    def _handle(self, event: _native.Event) -> None:
        if event.kind == TRANSFER:
            writes = self._transfers.pop(event.token, None)
            if writes is not None:
                writes.end(event, event_error(event, writes.peer))
        elif event.kind == ARRIVAL:
            counter = self._arrivals.get(event.token)
            if counter is not None:
                counter.end(None)
        elif event.kind == CONNECTED:
            self._connected(event)
        elif event.kind == FENCED:
            self._fences.pop(event.token).end(event_error(event, event.peer))
        elif event.kind == PEER_LOST:
            self._peer_lost(event)

    def _connected(self, event: _native.Event) -> None:
        outcome = event_error(event, event.peer) or self._connections.setdefault(
            event.lane, Connection(event.peer, event.lane)
        )
        future = self._connects.get(event.token)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _peer_lost(self, event: _native.Event) -> None:
        error = event_error(event, event.peer) or PeerLost("the peer is lost", peer=event.peer)
        self._mark_lost(event.peer, error.message)
        if self._native.stuck:
            self._abandon(event.peer)
        for callback in self._lost_callbacks:
            try:
                callback(event.peer, error)
            except Exception as raised:  # noqa: BLE001 - a task's outermost frame: other events must be handled
                context = {"message": "a callback of on_peer_lost raised", "exception": raised}
                self._loop.call_exception_handler(context)

    def _abandon(self, peer: int | None) -> None:
        """Ends transfers (to one peer, or all) whose events cannot come any more: the engine hangs in the provider."""
        for token, writes in list(self._transfers.items()):
            if peer is None or writes.peer == peer:
                del self._transfers[token]
                writes.abandon(PeerLost("the peer is lost, and the provider hangs", call="engine", peer=writes.peer))

    def _mark_lost(self, identity: int, why: str) -> None:
        gone = [lane for lane, connection in self._connections.items() if connection.identity == identity]
        for lane in gone:
            self._connections.pop(lane).lost = why


async def _resolve(loop: asyncio.AbstractEventLoop, host: str) -> str:
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


async def _interface(loop: asyncio.AbstractEventLoop, host: str) -> str:
    try:
        numeric = await _resolve(loop, host)
    except (OSError, UnicodeError) as error:
        raise FabricUnavailable(f"{host} does not resolve: {error}", call="getaddrinfo") from None
    if numeric in ("0.0.0.0", "::"):
        raise FabricUnavailable(f"{host} is no address that peers can reach: name one interface", call="bind")
    return numeric


def _spins(provider: str) -> bool:
    return provider.removeprefix("libfabric:").startswith(("verbs", "efa"))


def _connection(peer: Peer) -> Connection:
    if not isinstance(peer, Connection):
        raise TypeError("the peer is not of this fabric")
    return peer


def _region(region: MemoryRegion) -> Region:
    if not isinstance(region, Region):
        raise TypeError("the region is not of this fabric")
    return region


def _paged(write: PagedWrite) -> _native.PagedWrite:
    geometry = write.geometry
    return _native.PagedWrite(
        lane=_connection(write.peer).lane,
        source=_region(write.source).native,
        source_pages=write.source_pages,
        target=write.target,
        target_pages=write.target_pages,
        run_bytes=geometry.run_bytes,
        source_begin=geometry.source_begin,
        target_begin=geometry.target_begin,
        source_offset=geometry.source_offset,
        target_offset=geometry.target_offset,
        source_page_stride=geometry.source_page_stride,
        target_page_stride=geometry.target_page_stride,
        source_layer_stride=geometry.source_layer_stride,
        target_layer_stride=geometry.target_layer_stride,
        num_layers=geometry.num_layers,
        immediate=write.immediate,
        timeout_s=write.timeout_s,
    )
