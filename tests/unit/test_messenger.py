"""The messenger's two halves against each other, over a fabric whose writes happen when the test says so."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.engine.counter import create_counter
from shared.errors import AttemptFailed, BusError, MeshError, NobodyListens, PeerUnreachable, Refused, TransferCancelled
from shared.kv.digests import PageDigests
from shared.kv.ledger import PagePool
from shared.kv.shards import shard_layout
from shared.layout import KvLayout
from shared.messages import Announce, FabricEndpoint, InstanceRef, Load, ModelIdentity, Prefill, TailSlot
from shared.messenger.receiver import KvReceiver
from shared.messenger.sender import ChunkPart, KvSender
from tests.fake_fabric import FakeFabric

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, page_size=4, dtype="float32")
ATTEMPT = "00" * 16
OTHER = "11" * 16
PAGES_HERE, PAGES_THERE = 6, 8
PROMPT = 10
"""Nine tokens to prefill: three pages, the last one part-filled."""


class Pair:
    """A prefiller and a decoder, without their services."""

    def __init__(
        self,
        *,
        quarantine_s: float = 0.05,
        max_incoming: int = 4,
        layout: KvLayout = LAYOUT,
        source_tp: int = 1,
        target_tp: int = 1,
        hidden_bytes: int = 0,
    ) -> None:
        self.layout, self.source_tp, self.target_tp = layout, source_tp, target_tp
        self.here, self.there = shard_layout(layout, source_tp), shard_layout(layout, target_tp)
        network: dict[bytes, FakeFabric] = {}
        self.source, self.target = FakeFabric(1, network), FakeFabric(2, network)
        self.prefiller, self.decoder = InstanceRef("prefill", 1), InstanceRef("decode", 2)
        self.from_regions = [self.source.memory(self.here.region_bytes(PAGES_HERE)) for _ in range(source_tp)]
        self.to_regions = [self.target.memory(self.there.region_bytes(PAGES_THERE)) for _ in range(target_tp)]
        self.regions = self.to_regions
        self.digests = None
        self.from_region, self.to_region = self.from_regions[0], self.to_regions[0]
        self.from_region.memory[:] = bytes(i * 7 % 251 for i in range(self.from_region.length))
        self.sender = KvSender(
            *(self.source, self.from_regions, create_counter(), layout, PAGES_HERE),
            max_outgoing=2,
            timeout_s=5,
            hidden_bytes=hidden_bytes,
        )
        self.pool = PagePool(PAGES_THERE)
        self.digests: PageDigests | None = None
        self.receiver = KvReceiver(
            *(self.target, layout, target_tp),
            max_incoming=max_incoming,
            quarantine_s=quarantine_s,
            hidden_bytes=hidden_bytes,
        )

    def expect(self, attempt: str = ATTEMPT):
        self.pool.reserve(attempt, self.layout.pages_for(PROMPT + 1))
        return self.receiver.expect(attempt, self.announce(), PROMPT, self)

    def announce(self) -> Announce:
        return Announce(
            role="prefill",
            instance=self.prefiller,
            state="ready",
            model=ModelIdentity(name="m", digest="d", vocab_size=100, max_positions=64),
            layout=self.layout,
            fabric=FabricEndpoint("fake", self.source.address),
            max_batch=1,
            load=Load(free_pages=1, largest_free_pages=1, total_pages=1),
            http="",
            tp=self.source_tp,
        )

    def prefill(self, incoming, **changes) -> Prefill:
        fields = {
            "attempt": incoming.attempt,
            "prefiller": self.prefiller,
            "decoder": self.decoder,
            "fabric": FabricEndpoint("fake", self.target.address),
            "layout": self.layout,
            "num_pages": PAGES_THERE,
            "regions": [region.descriptor for region in self.to_regions],
            "pages": self.pool.pages(incoming.attempt)[:3],
            "immediate": incoming.slot.immediate,
            "tail": self.receiver.tail_slot(incoming),
            "tokens": list(range(PROMPT)),
            "budget_s": 5.0,
        }
        return Prefill(**{**fields, **changes})

    async def send(self, prefill: Prefill, source_pages=(5, 0, 2)):
        outgoing = await self.sender.open(prefill, timeout_s=1)
        self.sender.arm(0, [ChunkPart(outgoing, source_pages, range(0, 2))])
        self.sender.arm(3, [ChunkPart(outgoing, source_pages, range(2, 3))])
        return outgoing

    def land(self) -> None:
        for transfer in self.source.transfers:
            transfer.land()

    def page(self, region, pages: int, layer: int, page: int) -> bytes:
        at = LAYOUT.offset(layer, page, pages)
        return region.memory[at : at + LAYOUT.page_bytes]

    def check(self) -> None:
        self.pool.check_integrity()
        self.receiver.check_integrity()


async def never_answers(incoming, reason) -> None:
    await asyncio.Event().wait()


async def answers(incoming, reason) -> None:
    return


async def test_every_page_of_every_layer_arrives_and_the_tail_is_checked():
    pair = Pair()
    incoming = pair.expect()
    assert pair.pool.counts()["in_transit"] == 3
    outgoing = await pair.send(pair.prefill(incoming))
    finishing = asyncio.create_task(pair.sender.finish(outgoing))
    arriving = asyncio.create_task(pair.receiver.arrived(incoming))
    await asyncio.sleep(0)
    pair.source.transfers[0].land()
    await asyncio.sleep(0)
    assert not arriving.done(), "pages and tail are still on their way"
    pair.land()
    report = await finishing
    await arriving
    for layer in range(3):
        for source, target in zip((5, 0, 2), pair.pool.pages(ATTEMPT), strict=False):
            assert pair.page(pair.from_region, PAGES_HERE, layer, source) == pair.page(
                pair.to_region, PAGES_THERE, layer, target
            )
    assert report.bytes == 9 * LAYOUT.page_bytes + 48
    assert pair.pool.counts()["running"] == 3
    pair.pool.release(ATTEMPT)
    pair.check()


async def test_a_tail_of_another_attempt_is_refused_and_everything_is_reclaimed():
    pair = Pair()
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming, attempt=OTHER))
    finishing = asyncio.create_task(pair.sender.finish(outgoing))
    await asyncio.sleep(0)
    pair.land()
    await finishing
    with pytest.raises(AttemptFailed, match="attempt"):
        await pair.receiver.arrived(incoming)
    await pair.receiver.reclaim(incoming, "wrong tail", answers)
    assert pair.pool.free == PAGES_THERE
    pair.check()


@pytest.mark.case("L6")
async def test_pages_are_quarantined_until_the_prefiller_says_drained():
    pair = Pair(quarantine_s=60)
    incoming = pair.expect()
    answer = asyncio.Event()
    asked = asyncio.Event()

    async def ask(which, reason) -> None:
        assert reason == "the client left"
        asked.set()
        await answer.wait()

    reclaiming = asyncio.create_task(pair.receiver.reclaim(incoming, "the client left", ask))
    await asked.wait()
    assert pair.pool.counts()["quarantined"] == 3
    assert pair.pool.reserve(OTHER, PAGES_THERE - 2) is None, "a quarantined page is not given to another"
    pair.check()
    answer.set()
    await reclaiming
    assert (pair.pool.free, pair.target.fenced) == (PAGES_THERE, [])
    pair.check()


@pytest.mark.case("L1", "L6")
async def test_a_silent_prefiller_is_fenced_before_its_pages_return():
    pair = Pair()
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    before = bytes(pair.to_region.memory)
    await pair.receiver.reclaim(incoming, "deadline", never_answers)
    assert pair.target.fenced == [1]
    assert pair.pool.free == PAGES_THERE
    pair.land()
    assert bytes(pair.to_region.memory) == before, "a late write landed after the fence"
    await pair.sender.drain(outgoing)
    pair.check()


async def test_a_prefiller_that_is_gone_is_fenced_at_once():
    pair = Pair(quarantine_s=60)

    async def gone(incoming, reason) -> None:
        raise NobodyListens("gone")

    await pair.receiver.reclaim(pair.expect(), "x", gone)
    assert (pair.target.fenced, pair.pool.free) == ([1], PAGES_THERE)
    pair.check()


async def test_while_the_broker_is_away_the_prefiller_is_asked_again():
    pair = Pair(quarantine_s=60)
    asked = 0

    async def ask(incoming, reason) -> None:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise BusError("away")

    await pair.receiver.reclaim(pair.expect(), "x", ask)
    assert (asked, pair.target.fenced, pair.pool.free) == (3, [], PAGES_THERE)


async def test_a_fence_settles_all_that_came_from_that_peer():
    pair = Pair(quarantine_s=60)
    first = pair.expect()
    reclaiming = asyncio.create_task(pair.receiver.reclaim(first, "x", never_answers))
    await asyncio.sleep(0)
    await pair.receiver.fence(pair.prefiller.incarnation)
    await reclaiming
    assert pair.pool.free == PAGES_THERE
    pair.check()


async def test_slots_are_bounded():
    pair = Pair(max_incoming=1)
    pair.expect()
    pair.pool.reserve(OTHER, 1)
    with pytest.raises(Refused, match="1 attempts already wait"):
        pair.receiver.expect(OTHER, pair.announce(), 3, pair)
    pair.check()


def grants_of(pair: Pair) -> list[bool]:
    """Whether each that was ever given is closed."""
    return [grant.closed for region in pair.target.regions.values() for grant in region.grants]


async def test_grants_end_with_their_attempt():
    """However it ends; those of another stay open."""
    pair = Pair(target_tp=2)
    first = pair.expect()
    assert grants_of(pair) == [False] * 3, "one a rank, and the tail's"
    outgoing = await pair.send(pair.prefill(first))
    pair.land()
    pair.sender._write_tail(outgoing, b"").land()
    await pair.receiver.arrived(first)
    assert grants_of(pair) == [True] * 3
    pair.pool.reserve(OTHER, 3)
    second = pair.receiver.expect(OTHER, pair.announce(), PROMPT, pair)
    assert sorted(grants_of(pair)) == [False] * 3 + [True] * 3
    await pair.receiver.reclaim(second, "x", answers)
    assert grants_of(pair) == [True] * 6
    pair.check()


async def test_a_sharding_that_is_none_takes_no_slot():
    pair = Pair(max_incoming=1)
    pair.pool.reserve(OTHER, 3)
    with pytest.raises(ValueError, match="tensor parallel 3"):
        pair.receiver.expect(OTHER, msgspec.structs.replace(pair.announce(), tp=3), PROMPT, pair)
    pair.check()
    assert grants_of(pair) == []


async def test_drained_for_an_unknown_attempt_is_nothing():
    pair = Pair()
    assert pair.receiver.drained(OTHER, pair.prefiller) is None


async def test_the_sender_drains_what_was_armed():
    pair = Pair()
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    await pair.sender.drain(outgoing)
    with pytest.raises(TransferCancelled):
        await outgoing.transfers[0].wait()
    pair.land()
    assert not pair.target.arrivals[incoming.slot.immediate].done.is_set()
    pair.sender._slots.check_integrity()
    assert pair.sender._slots.free == 2


@pytest.mark.case("F7")
async def test_an_unreachable_decoder_is_named():
    pair = Pair()
    incoming = pair.expect()
    with pytest.raises(PeerUnreachable, match="nobody at ffff"):
        await pair.sender.open(pair.prefill(incoming, fabric=FabricEndpoint("fake", b"\xff\xff")), timeout_s=1)
    assert pair.sender._slots.free == 2


async def test_a_prompt_whose_chunk_completes_no_page_arms_nothing():
    pair = Pair()
    incoming = pair.expect()
    outgoing = await pair.sender.open(pair.prefill(incoming), timeout_s=1)
    pair.sender.arm(0, [ChunkPart(outgoing, (1, 2, 3), range(0, 0))])
    assert (await outgoing.transfers[0].wait()).writes == 0
    assert outgoing.writes == 0
    assert TailSlot(b"", 0) != pair.receiver.tail_slot(incoming)


async def landed(pair):
    """An attempt all of whose writes have completed, and the sender's report of it."""
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    finishing = asyncio.create_task(pair.sender.finish(outgoing))
    await asyncio.sleep(0)
    pair.land()
    await finishing
    return incoming, outgoing


async def test_giving_up_what_has_arrived_is_nothing():
    """The word about it failed, the KV came: both ends may be asked for, in any order."""
    pair = Pair()
    incoming, outgoing = await landed(pair)
    await pair.receiver.arrived(incoming)
    await pair.receiver.reclaim(incoming, "no answer in time", answers)
    await pair.sender.drain(outgoing)
    await pair.sender.drain(outgoing)
    assert (pair.sender._slots.free, pair.pool.free) == (2, PAGES_THERE)
    pair.check()


async def sent_with(pair: Pair, hidden: bytes):
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    finishing = asyncio.create_task(pair.sender.finish(outgoing, (5, 0, 2), hidden))
    while len(pair.source.transfers) == 2 * len(outgoing.runs) and not finishing.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    pair.land()
    await finishing
    return incoming


async def test_a_hidden_state_comes_with_the_tail():
    hidden = bytes(range(256)) * 3
    pair = Pair(hidden_bytes=len(hidden))
    incoming = await sent_with(pair, hidden)
    assert incoming.expected.payload_bytes == len(hidden)
    assert await pair.receiver.arrived(incoming) == hidden
    pair.check()


async def test_a_hidden_state_of_another_size_is_not_sent():
    pair = Pair(hidden_bytes=64)
    with pytest.raises(MeshError, match="a hidden state of 60 bytes, not 64"):
        await sent_with(pair, bytes(60))


async def test_a_tail_without_its_hidden_state_is_refused():
    pair = Pair(hidden_bytes=64)
    pair.sender._hidden_bytes = 0
    incoming = await sent_with(pair, b"")
    with pytest.raises(AttemptFailed, match="payload bytes is 0, expected 64"):
        await pair.receiver.arrived(incoming)
