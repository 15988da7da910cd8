"""The messenger's receiving half, in a decoder: one `Incoming` an attempt whose KV is on its way.

    expect ──▶ arrived                     the counter reached its number, the tail is right: pages are `running`
      └──────▶ reclaim ──▶ released        cancelled or failed: pages are `quarantined` until no write can land

No page and no immediate is reused while a write to it can still land: `reclaim` releases them only when the prefiller said
that its writes have drained, or after the connection with it was closed on this side (the fence).
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import msgspec

from shared.errors import AttemptFailed, BusError, NobodyListens, Refused
from shared.kv import digests, plan, shards, tail
from shared.kv.digests import PageDigests, Piece
from shared.kv.ledger import PagePool
from shared.kv.shards import ShardRun
from shared.kv.slots import Slot, SlotPool
from shared.layout import KvLayout
from shared.messages import Announce, InstanceRef, TailSlot
from shared.transfer.interface import Arrival, Fabric, MemoryGrant, MemoryRegion

AskDrained = Callable[["Incoming", str], Awaitable[None]]
"""Tells the prefiller that the attempt is cancelled (and why), and returns once it answered that its writes have drained."""

_ASK_AGAIN_S = 0.1


class Home(Protocol):
    """Where an attempt's KV goes: the pool and the regions, one a tensor parallel rank, of a data parallel rank."""

    @property
    def pool(self) -> PagePool: ...
    @property
    def regions(self) -> Sequence[MemoryRegion]: ...
    @property
    def digests(self) -> PageDigests | None:
        """Of the pool's pages, where they are to be checked."""
        ...


class Grants:
    """What one attempt's prefiller may write to, and as long as the attempt is on its way."""

    def __init__(self, regions: Sequence[MemoryRegion], tails: MemoryRegion, slot: Slot, slot_bytes: int) -> None:
        with ExitStack() as made:
            self.regions = [_granted(made, region, 0, region.length) for region in regions]
            self.tail = _granted(made, tails, slot.tail_offset, slot_bytes)
            self._made = made.pop_all()

    def close(self) -> None:
        self._made.close()


def _granted(made: ExitStack, region: MemoryRegion, offset: int, length: int) -> MemoryGrant:
    grant = region.grant(offset, length)
    made.callback(grant.close)
    return grant


class DigestCheck(msgspec.Struct, frozen=True):
    """How an attempt's pages are checked when they are here: `pieces` of each."""

    memory: PageDigests
    pages: list[int]
    pieces: list[Piece]


class Incoming:
    """One attempt's KV on its way in. `settled` is set once no write of it can land any more."""

    def __init__(
        self,
        prefiller: InstanceRef,
        home: Home,
        slot: Slot,
        arrival: Arrival,
        expected: tail.Tail,
        grants: Grants,
        check: DigestCheck | None,
    ) -> None:
        self.attempt = expected.attempt
        self.prefiller = prefiller
        self.pool = home.pool
        self.slot = slot
        self.arrival = arrival
        self.expected = expected
        self.grants = grants
        self.check = check
        self.settled = asyncio.Event()


class KvReceiver:
    """Owns the tail region, the slots and the armed counters; pages are their pools', the fabric its caller's. `layout` is the
    whole model's, `tp` the sharding of whatever pool an attempt's pages are in."""

    def __init__(
        self,
        fabric: Fabric,
        layout: KvLayout,
        tp: int,
        *,
        max_incoming: int,
        quarantine_s: float,
        most_pages: int = 0,
        hidden_bytes: int = 0,
    ) -> None:
        """`most_pages` of one attempt have digests: 0 where none are asked for. `hidden_bytes`: of the hidden state that comes
        with every tail; 0: none does."""
        self._fabric = fabric
        self._layout = layout
        self._tp = tp
        self.quarantine_s = quarantine_s
        self._hidden_bytes = hidden_bytes
        slot_bytes = tail.SLOT_BYTES + digests.digests_bytes(layout, most_pages) + hidden_bytes
        self._slots = SlotPool(max_incoming, slot_bytes)
        self._incoming: dict[str, Incoming] = {}
        fd = os.memfd_create("kvmesh-tails-in")
        try:
            os.ftruncate(fd, self._slots.region_bytes)
            self._tails = mmap.mmap(fd, self._slots.region_bytes)
            self._region = fabric.register(fd, self._slots.region_bytes)
        finally:
            os.close(fd)

    def expect(self, attempt: str, prefiller: Announce, prompt_tokens: int, home: Home) -> Incoming:
        """Arms the attempt's counter with the writes that the two shardings make, and grants them; its pages of `home.pool` are
        already reserved. Raises `Refused` when no slot is free. Nothing may be sent to the prefiller before this."""
        runs = shards.runs(self._layout, prefiller.tp, self._tp, attempt)
        slot = self._slots.take()
        if slot is None:
            raise Refused(f"{self._slots.count} attempts already wait for their KV")
        tokens = plan.prefill_tokens(prompt_tokens)
        counts = [sum(run.group == group for run in runs) for group in range(len(self._layout.groups))]
        writes = plan.expected_writes(self._layout, prompt_tokens, *counts)
        pages = self._layout.pages_for(tokens)
        check = _digest_check(home, attempt, pages, runs)
        payload_bytes = digests.digests_bytes(self._layout, pages) if check else 0
        payload_bytes += self._hidden_bytes
        expected = tail.Tail(attempt, self._layout.digest(), tokens, pages, writes, payload_bytes)
        self._tails[slot.tail_offset : slot.tail_offset + tail.SLOT_BYTES] = bytes(tail.SLOT_BYTES)
        grants = Grants(home.regions, self._region, slot, self._slots.slot_bytes)
        arrival = self._fabric.expect(slot.immediate, writes)
        incoming = Incoming(prefiller.instance, home, slot, arrival, expected, grants, check)
        self._incoming[attempt] = incoming
        home.pool.mark(attempt, "in_transit", 0, pages)
        return incoming

    def tail_slot(self, incoming: Incoming) -> TailSlot:
        return TailSlot(incoming.grants.tail.descriptor, incoming.grants.tail.offset)

    async def arrived(self, incoming: Incoming) -> bytes:
        """Until all of the attempt's writes are here; then its pages are `running`. The hidden state that came with the tail.
        Raises `AttemptFailed` when the tail is not this attempt's, or a page not what the prefiller wrote: the caller then
        calls `reclaim`, as it does on any other error."""
        await incoming.arrival.wait()
        offset = incoming.slot.tail_offset
        with memoryview(self._tails) as view:
            tail.check(bytes(view[offset : offset + tail.HEADER_BYTES]), incoming.expected)
        if incoming.check is not None:
            await self._check_pages(incoming, incoming.check)
        hidden = self._payload(incoming)[incoming.expected.payload_bytes - self._hidden_bytes :]
        incoming.pool.mark(incoming.attempt, "running")
        self._forget(incoming)
        return hidden

    def _payload(self, incoming: Incoming) -> bytes:
        begin = incoming.slot.tail_offset + tail.HEADER_BYTES
        return self._tails[begin : begin + incoming.expected.payload_bytes]

    async def _check_pages(self, incoming: Incoming, check: DigestCheck) -> None:
        told = self._payload(incoming)[: incoming.expected.payload_bytes - self._hidden_bytes]
        found = await check.memory.take(check.pages, check.pieces)
        different = digests.first_difference(self._layout, found, told)
        if different is not None:
            page, layer = different
            where = f"page {check.pages[page]} (number {page} of the prompt), layer {layer}"
            raise AttemptFailed("transfer", f"{where}, is not what {incoming.prefiller.name} wrote")

    def drained(self, attempt: str, prefiller: InstanceRef) -> Incoming | None:
        """`prefiller` says that no write of `attempt` can land any more. None where the attempt is not on its way, or not from
        there: another's word frees no page."""
        incoming = self._incoming.get(attempt)
        if incoming is None or incoming.prefiller != prefiller:
            return None
        incoming.settled.set()
        return incoming

    def from_peer(self, incarnation: int) -> list[Incoming]:
        """What is on its way from that prefiller."""
        return [incoming for incoming in self._incoming.values() if incoming.prefiller.incarnation == incarnation]

    async def reclaim(self, incoming: Incoming, reason: str, ask_drained: AskDrained) -> None:
        """Quarantines the attempt's pages, tells the prefiller, and releases pages and slot once no write can land: the
        prefiller answered, or it did not within `quarantine_s` and its connection was closed."""
        incoming.pool.mark(incoming.attempt, "quarantined")
        try:
            async with asyncio.timeout(self.quarantine_s):
                await self._confirmed(incoming, reason, ask_drained)
        except (TimeoutError, NobodyListens):
            await self.fence(incoming.prefiller.incarnation)
        self._forget(incoming)
        incoming.pool.release(incoming.attempt)

    async def fence(self, incarnation: int) -> None:
        """Closes the connection with a prefiller; afterwards no write of it can land, so all that came from it is settled."""
        await self._fabric.fence(incarnation)
        for incoming in self.from_peer(incarnation):
            incoming.settled.set()

    def check_integrity(self) -> None:
        """Raises `AssertionError` where slots and attempts do not match."""
        self._slots.check_integrity()
        assert self._slots.count - self._slots.free == len(self._incoming), "a slot without an attempt"

    def close(self) -> None:
        for incoming in self._incoming.values():
            incoming.arrival.close()
        self._region.close()
        self._tails.close()

    async def _confirmed(self, incoming: Incoming, reason: str, ask_drained: AskDrained) -> None:
        """Until the attempt is settled, by whichever comes first: the prefiller's answer, its own word, a fence."""
        settled = asyncio.create_task(incoming.settled.wait())
        asking = asyncio.create_task(_ask_until_answered(incoming, reason, ask_drained))
        try:
            done, _ = await asyncio.wait({settled, asking}, return_when=asyncio.FIRST_COMPLETED)
            if settled not in done:
                await asking
        finally:
            settled.cancel()
            asking.cancel()
            await asyncio.gather(settled, asking, return_exceptions=True)

    def _forget(self, incoming: Incoming) -> None:
        """Idempotent: what has arrived may also be given up."""
        if self._incoming.pop(incoming.attempt, None) is not None:
            incoming.arrival.close()
            incoming.grants.close()
            self._slots.give_back(incoming.slot)


def _digest_check(home: Home, attempt: str, pages: int, runs: Sequence[ShardRun]) -> DigestCheck | None:
    if home.digests is None:
        return None
    return DigestCheck(home.digests, home.pool.pages(attempt)[:pages], digests.at_target(runs))


async def _ask_until_answered(incoming: Incoming, reason: str, ask_drained: AskDrained) -> None:
    """Raises `NobodyListens` when that start of the prefiller is gone; goes on while only the broker is away."""
    while True:
        try:
            await ask_drained(incoming, reason)
        except NobodyListens:
            raise
        except BusError:
            await asyncio.sleep(_ASK_AGAIN_S)
        else:
            return
