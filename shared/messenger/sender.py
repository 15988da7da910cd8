"""The messenger's sending half, in a prefiller: one `Outgoing` an attempt.

open ──arm(chunk)*──▶ finish ──▶ reported        every write completed at the decoder, the tail last posted
  └──────────────────▶ drain                      on cancel or failure: nothing outstanding, nothing will be posted
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from shared.errors import FabricError, MeshError
from shared.kv import digests, plan, shards, tail
from shared.kv.digests import PageDigests
from shared.kv.shards import ShardRun
from shared.kv.slots import Slot, SlotPool
from shared.layout import KvLayout
from shared.messages import Prefill
from shared.transfer.interface import (
    Fabric,
    LayerTiming,
    LayerWatcher,
    MemoryRegion,
    PagedWrite,
    PageGeometry,
    Peer,
    Transfer,
    TransferReport,
)


class Run(msgspec.Struct, frozen=True):
    """What one source rank writes to one target rank of every page, in one run: in the layers from `first_layer` on that the
    geometry has."""

    source: MemoryRegion
    target: bytes
    geometry: PageGeometry
    first_layer: int


class Outgoing:
    """One attempt's KV on its way out. `source_pages[i]` holds the same tokens as the decoder's `prefill.pages[i]`."""

    def __init__(self, prefill: Prefill, peer: Peer, slot: Slot, runs: Sequence[Run]) -> None:
        self.prefill = prefill
        self.peer = peer
        self.slot = slot
        self.holds_slot = True
        self.runs = runs
        self.transfers: list[Transfer] = []
        """One a run for each chunk, in order, a group of layers after another; then the tail's."""
        self.writes = 0


class ChunkPart(msgspec.Struct, frozen=True):
    """What one chunk completes of one attempt: page positions `pages`, of the source pages `source_pages`."""

    outgoing: Outgoing
    source_pages: Sequence[int]
    pages: range


class SentReport(msgspec.Struct, frozen=True):
    """What of an attempt was transferred: a report a chunk, over all ranks, then the tail's."""

    chunks: list[TransferReport]
    tail: TransferReport

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.chunks) + self.tail.bytes


class KvSender:
    """Owns the watcher and the tails' staging memory; the fabric and the KV regions, one a rank, are its caller's."""

    def __init__(
        self,
        fabric: Fabric,
        regions: Sequence[MemoryRegion],
        counter_fd: int,
        layout: KvLayout,
        num_pages: int,
        *,
        max_outgoing: int,
        timeout_s: float,
        most_pages: int = 0,
        hidden_bytes: int = 0,
        page_digests: PageDigests | None = None,
    ) -> None:
        """`page_digests`: of the KV regions, where decoders may ask for digests, of `most_pages` at the most. `hidden_bytes`: of
        the hidden state that goes with every tail; 0: none does."""
        self._fabric = fabric
        self._regions = regions
        self._layout = layout
        self._num_pages = num_pages
        self._timeout_s = timeout_s
        self._page_digests = page_digests
        self._hidden_bytes = hidden_bytes
        slot_bytes = tail.SLOT_BYTES + digests.digests_bytes(layout, most_pages) + hidden_bytes
        self._slots = SlotPool(max_outgoing, slot_bytes)
        fd = os.memfd_create("kvmesh-tails-out")
        try:
            os.ftruncate(fd, self._slots.region_bytes)
            self._tails = mmap.mmap(fd, self._slots.region_bytes)
            self._tail_region = fabric.register(fd, self._slots.region_bytes)
        finally:
            os.close(fd)
        self._watcher: LayerWatcher = fabric.watch(counter_fd)

    async def open(self, prefill: Prefill, *, timeout_s: float) -> Outgoing:
        """Connects to the decoder, whose sharding fits (`shared.kv.shards.fit`). Raises `PeerUnreachable`, naming the address,
        or `MeshError` when too many are open."""
        runs = self._runs(prefill)
        peer = await self._fabric.connect(prefill.fabric.address, timeout_s=timeout_s)
        slot = self._slots.take()
        if slot is None:
            raise MeshError(f"more than {self._slots.count} attempts are being sent")
        return Outgoing(prefill, peer, slot, runs)

    def arm(self, counter: int, parts: Sequence[ChunkPart]) -> list[tuple[Outgoing, FabricError]]:
        """Before a chunk's forward: layer l of every part is written when the layer counter passes `counter + l`. Returns
        the parts that cannot be written (a connection just lost, a descriptor that is none), each with its error."""
        try:
            self._arm(counter, parts)
        except FabricError:
            return self._arm_each(counter, parts)
        return []

    def disarm(self) -> None:
        """The chunk failed: nothing more of it is written."""
        self._watcher.disarm()

    async def finish(self, outgoing: Outgoing, source_pages: Sequence[int] = (), hidden: bytes = b"") -> SentReport:
        """After the last chunk: writes the tail, and waits until everything has completed at the decoder. `source_pages` are
        all of the attempt's, for its digests. `hidden` goes with the tail. Raises what `Transfer.wait` raises, and `MeshError`
        where what goes with the tail is not what it should be; call `drain` then."""
        if len(hidden) != self._hidden_bytes:
            raise MeshError(f"a hidden state of {len(hidden)} bytes, not {self._hidden_bytes}")
        payload = await self._digests(outgoing, source_pages) + hidden
        tail_transfer = self._write_tail(outgoing, payload)
        outgoing.transfers.append(tail_transfer)
        *sent, tail_report = [await transfer.wait() for transfer in outgoing.transfers]
        self._give_back(outgoing)
        each = len(outgoing.runs)
        groups = _by_group(outgoing.runs)
        return SentReport([_together(sent[i : i + each], groups) for i in range(0, len(sent), each)], tail_report)

    async def drain(self, outgoing: Outgoing) -> None:
        """Cancels what is left. When it returns no write of this attempt is outstanding and none will be posted. Idempotent,
        also after `finish`."""
        for transfer in outgoing.transfers:
            transfer.cancel()
        for transfer in outgoing.transfers:
            try:
                await transfer.wait()
            except FabricError:
                continue  # how it ended does not matter: `wait` raises only once nothing is outstanding
        self._give_back(outgoing)

    def close(self) -> None:
        self._watcher.close()
        self._tail_region.close()
        self._tails.close()

    def _arm_each(self, counter: int, parts: Sequence[ChunkPart]) -> list[tuple[Outgoing, FabricError]]:
        """One bad part must not take the others with it: each is a plan of its own, one after another."""
        failed = []
        for part in parts:
            try:
                self._arm(counter, [part])
            except FabricError as error:
                failed.append((part.outgoing, error))
        return failed

    def _arm(self, counter: int, parts: Sequence[ChunkPart]) -> None:
        """All parts as one plan a group of layers, or, when it raises, none of them."""
        armed: list[Iterator[Transfer]] = []
        try:
            for group in range(len(self._layout.groups)):
                first = self._layout.first_layer(group)
                writes = [write for part in parts for write in self._paged_writes(part, first)]
                armed.append(iter(self._watcher.arm(counter + first, writes)))
        except FabricError:
            for transfer in (one for transfers in armed for one in transfers):
                transfer.cancel()  # nothing of it was posted: the counter has not moved
            raise
        for part in parts:
            outgoing = part.outgoing
            for transfers, runs in zip(armed, _by_group(outgoing.runs), strict=True):
                outgoing.transfers += [next(transfers) for _ in runs]
                outgoing.writes += sum(len(part.pages) * run.geometry.num_layers for run in runs)

    def _give_back(self, outgoing: Outgoing) -> None:
        if outgoing.holds_slot:
            outgoing.holds_slot = False
            self._slots.give_back(outgoing.slot)

    def _runs(self, prefill: Prefill) -> list[Run]:
        source_tp, target_tp = len(self._regions), prefill.tp
        runs = shards.runs(self._layout, source_tp, target_tp, prefill.attempt)
        return [
            Run(
                self._regions[run.source_rank],
                prefill.regions[run.target_rank],
                self._geometry(run, source_tp, prefill),
                self._layout.first_layer(run.group),
            )
            for run in runs
        ]

    def _geometry(self, run: ShardRun, source_tp: int, prefill: Prefill) -> PageGeometry:
        ours, theirs = shards.shard_layout(self._layout, source_tp), shards.shard_layout(self._layout, prefill.tp)
        first = self._layout.first_layer(run.group)
        source, target = ours.groups[run.group], theirs.groups[run.group]
        return PageGeometry(
            run_bytes=run.length,
            source_offset=run.source_offset,
            target_offset=run.target_offset,
            source_begin=ours.offset(first, 0, self._num_pages),
            target_begin=theirs.offset(first, 0, prefill.num_pages),
            source_page_stride=source.page_bytes,
            target_page_stride=target.page_bytes,
            source_layer_stride=source.layer_stride(self._num_pages),
            target_layer_stride=target.layer_stride(prefill.num_pages),
            num_layers=source.num_layers,
        )

    def _paged_writes(self, part: ChunkPart, first_layer: int) -> list[PagedWrite]:
        prefill = part.outgoing.prefill
        source_pages = [part.source_pages[i] for i in part.pages]
        target_pages = [prefill.pages[i] for i in part.pages]
        return [
            PagedWrite(
                peer=part.outgoing.peer,
                source=run.source,
                source_pages=source_pages,
                target=run.target,
                target_pages=target_pages,
                geometry=run.geometry,
                immediate=prefill.immediate,
                timeout_s=self._timeout_s,
            )
            for run in part.outgoing.runs
            if run.first_layer == first_layer
        ]

    async def _digests(self, outgoing: Outgoing, source_pages: Sequence[int]) -> bytes:
        """Of what is written; nothing where the decoder does not ask for it."""
        prefill = outgoing.prefill
        if not prefill.digests:
            return b""
        if self._page_digests is None:
            raise MeshError("the decoder asks for digests, which this prefiller does not make")
        runs = shards.runs(self._layout, len(self._regions), prefill.tp, prefill.attempt)
        return await self._page_digests.take(source_pages[: len(prefill.pages)], digests.at_source(runs))

    def _write_tail(self, outgoing: Outgoing, payload: bytes) -> Transfer:
        prefill, offset = outgoing.prefill, outgoing.slot.tail_offset
        tokens = plan.prefill_tokens(len(prefill.tokens))
        outgoing.writes += 1
        pages = self._layout.pages_for(tokens)
        head = tail.Tail(prefill.attempt, self._layout.digest(), tokens, pages, outgoing.writes, len(payload))
        packed = head.pack() + payload
        self._tails[offset : offset + len(packed)] = packed
        return self._fabric.write(
            outgoing.peer,
            self._tail_region,
            offset,
            prefill.tail.region,
            prefill.tail.offset,
            len(packed),
            prefill.immediate,
            timeout_s=self._timeout_s,
        )


def _by_group(runs: Sequence[Run]) -> list[list[Run]]:
    """In the order of their layers, which is theirs."""
    return [list(group) for _, group in groupby(runs, lambda run: run.first_layer)]


def _together(reports: Sequence[TransferReport], groups: Sequence[Sequence[Run]]) -> TransferReport:
    """Of a chunk's transfers, one a run: those of the same layers run beside one another."""
    remaining = iter(reports)
    layers = [
        LayerTiming(min(run.posted_ns for run in layer), max(run.completed_ns for run in layer))
        for group in groups
        for layer in zip(*(next(remaining).layers for _ in group), strict=True)
    ]
    return TransferReport(sum(report.writes for report in reports), sum(report.bytes for report in reports), layers)
