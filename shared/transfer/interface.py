"""What the messenger needs of a fabric, as Protocols. `shared.transfer.fabric.Fabric` is the one implementation, over the
native module; tests of policy may bring their own.

Words: a *peer* is a connection to another process's fabric: its own endpoint on both sides, so that closing it is a fence
(no byte of that peer can land afterwards). A *region* is memory registered here (`MemoryRegion`, local) or over there
(`bytes`, its descriptor). An *immediate* is the 32-bit value that every write carries and the target counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from shared.errors import FabricError


class PageGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Byte arithmetic of paged writes. Page p of layer l begins at `begin + l * layer_stride + p * page_stride` on each side, and
    what is written of it is one run: `run_bytes` from `offset` in the page, which must end within the page. The layer strides
    differ where the pools' sizes do, page strides and offsets where the two sides' shards do."""

    run_bytes: int
    source_offset: int
    target_offset: int
    source_page_stride: int
    target_page_stride: int
    source_layer_stride: int
    target_layer_stride: int
    num_layers: int
    source_begin: int = 0
    target_begin: int = 0


class LayerTiming(msgspec.Struct, frozen=True):
    """When a layer's writes were posted (first) and completed (last), CLOCK_MONOTONIC nanoseconds."""

    posted_ns: int
    completed_ns: int


class TransferReport(msgspec.Struct, frozen=True):
    """What a finished transfer did. `layers` has one entry a layer of the plan, or a single one for a plain write."""

    writes: int
    bytes: int
    layers: list[LayerTiming]


class MemoryRegion(Protocol):
    """Memory of this process that is registered with every NIC of the fabric."""

    @property
    def length(self) -> int: ...
    @property
    def descriptor(self) -> bytes:
        """What a peer needs to write here: base, length and (address, key) per NIC, as bytes."""
        ...

    def grant(self, offset: int, length: int) -> MemoryGrant:
        """Lets one attempt write to `length` bytes from `offset`."""
        ...

    def close(self) -> None:
        """Unregister. Idempotent. Writes that still arrive are refused."""
        ...


class MemoryGrant(Protocol):
    """Leave to write to a range of a region, for one attempt."""

    @property
    def descriptor(self) -> bytes:
        """Like the region's; of this grant alone where the provider's keys cost nothing (see `handles.Region.grant`)."""
        ...

    @property
    def offset(self) -> int:
        """Where the range begins in what the descriptor describes."""
        ...

    def close(self) -> None:
        """Takes it back: a write that begins to arrive later is refused at the target, and costs its initiator the
        connection. Idempotent. No fence: a write of which a part has arrived may still end."""
        ...


class Peer(Protocol):
    """A live connection. After loss or fence every call with it raises `PeerLost`."""

    @property
    def identity(self) -> int:
        """The other process's incarnation, from its hello."""
        ...


class Transfer(Protocol):
    """Writes that were handed to the fabric."""

    async def wait(self) -> TransferReport:
        """Until every write has completed at the target. Raises `TransferCancelled`, `TransferTimeout`, `PeerLost`,
        `RemoteAccessError`; when it raises, no write of this transfer is outstanding and none will be posted. Cancelling
        the waiting task does not cancel the transfer."""
        ...

    def cancel(self) -> None:
        """Post no more writes; `wait` ends when those posted have drained. Idempotent, also after the end."""
        ...


class Arrival(Protocol):
    """An armed immediate counter."""

    async def wait(self) -> None:
        """Until `count` writes with this immediate have arrived. No deadline of its own: the caller has one."""
        ...

    def close(self) -> None:
        """Disarm. Idempotent. The immediate may be armed again afterwards, but only when no write with it can arrive;
        until then arrivals with it are late ones and count for nobody."""
        ...


class LayerWatcher(Protocol):
    """Watches one layer counter and posts each layer's writes when the counter passes it."""

    def arm(self, first: int, writes: Sequence[PagedWrite]) -> list[Transfer]:
        """One plan, for one chunk: when the counter reaches `first + l + 1`, layer l of every `PagedWrite` is posted.
        `first` is the counter's value before the chunk. Plans are armed in order and may be armed ahead. A transfer with
        no pages completes at once."""
        ...

    def disarm(self) -> None:
        """Drop all armed plans (a step failed): their transfers end as cancelled."""
        ...

    def close(self) -> None: ...


class PagedWrite(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry's run of source_pages[i] → that of target_pages[i], in every layer, one write and one immediate each.
    A run past its page or its region is refused with `RemoteAccessError` before anything is written."""

    peer: Peer
    source: MemoryRegion
    source_pages: Sequence[int]
    target: bytes
    target_pages: Sequence[int]
    geometry: PageGeometry
    immediate: int
    timeout_s: float


class Fabric(Protocol):
    """One process's fabric. Everything is called from one event loop's thread."""

    @property
    def provider(self) -> str: ...
    @property
    def address(self) -> bytes:
        """Opaque; what `connect` takes on the other side. Changes with every fence: give the current one with each piece
        of work, for a fenced peer is let in again only with one from after its fence."""
        ...

    @property
    def stuck(self) -> bool:
        """The provider hangs (shm can, when a peer dies inside it): nothing will be written any more by this process."""
        ...

    def register(self, fd: int, length: int) -> MemoryRegion:
        """Maps `length` bytes of a memfd and registers them. The descriptor is not kept."""
        ...

    async def connect(self, address: bytes, *, timeout_s: float) -> Peer:
        """The live connection to that process: an existing one, or a new one, tried until `timeout_s` is over.
        Raises `PeerUnreachable` with the address that was tried. Concurrent calls share one attempt."""
        ...

    def expect(self, immediate: int, count: int) -> Arrival:
        """Arm a counter. `count` 0 is complete at once. Immediates that came before are counted."""
        ...

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
    ) -> Transfer:
        """One write with one immediate. `length` 0 sends only the immediate."""
        ...

    def write_pages(self, write: PagedWrite) -> Transfer:
        """All layers of `write` now, without a counter."""
        ...

    def watch(self, counter_fd: int) -> LayerWatcher: ...

    async def fence(self, identity: int) -> None:
        """Close the connection with that peer, if there is one, on this side. When it returns no byte of that peer can
        land in any region here, whatever the other side does. Outstanding transfers end as `PeerLost`."""
        ...

    def on_peer_lost(self, callback: Callable[[int, FabricError], None]) -> None:
        """Called in the event loop, once for each peer that is lost (end of file, or silence of about a second)."""
        ...

    async def close(self) -> None:
        """Ends everything in order. Idempotent."""
        ...
