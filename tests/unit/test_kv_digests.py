"""Digests of pages: the same at both ends for every two shardings, and never for another content."""

from __future__ import annotations

import asyncio
import mmap
import os
from array import array

import pytest

from shared.errors import AttemptFailed, MeshError
from shared.kv import digests
from shared.kv.digests import PageDigests, at_source, at_target, digests_bytes, first_difference
from shared.kv.shards import runs, shard_layout
from shared.messages import Prefill
from shared.messenger.receiver import KvReceiver
from shared.messenger.sender import KvSender
from tests.unit.test_messenger import ATTEMPT, PAGES_HERE, PAGES_THERE, Pair
from tests.unit.test_messenger_ranks import DRAFTED, LATENT, SHARDED, fill

SOURCE_PAGES = (5, 0, 2)
SIZES = [1, 2, 4, 8]


class VerifyingPair(Pair):
    """Sender and receiver with digests of all pages."""

    def __init__(self, layout, source_tp=1, target_tp=1, hidden_bytes=0):
        super().__init__(layout=layout, source_tp=source_tp, target_tp=target_tp)
        self.receiver.close()
        self.sender.close()
        self.receiver = KvReceiver(
            *(self.target, layout, target_tp),
            max_incoming=4,
            quarantine_s=0.05,
            most_pages=3,
            hidden_bytes=hidden_bytes,
        )
        counter = os.memfd_create("counter")
        os.ftruncate(counter, 4096)
        ours = PageDigests([memoryview(region.memory) for region in self.from_regions], self.here, PAGES_HERE)
        self.sender = KvSender(
            *(self.source, self.from_regions, counter, layout, PAGES_HERE),
            max_outgoing=2,
            timeout_s=5,
            most_pages=3,
            page_digests=ours,
            hidden_bytes=hidden_bytes,
        )
        self.digests = PageDigests([memoryview(region.memory) for region in self.to_regions], self.there, PAGES_THERE)
        fill(self)

    def prefill(self, incoming, **changes) -> Prefill:
        return super().prefill(incoming, digests=True, **changes)

    async def bring(self, incoming, hidden=b"", **changes):
        """All of the attempt's writes land, and the tail."""
        outgoing = await self.send(self.prefill(incoming, **changes))
        self.land()
        finishing = asyncio.create_task(self.sender.finish(outgoing, SOURCE_PAGES, hidden))
        while len(self.source.transfers) == 2 * len(outgoing.runs):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.land()
        await finishing


@pytest.mark.parametrize("layout", [SHARDED, LATENT, DRAFTED], ids=["gqa", "mla", "drafted"])
@pytest.mark.parametrize("source_tp", SIZES)
@pytest.mark.parametrize("target_tp", SIZES)
async def test_what_was_written_is_found_right_for_every_two_shardings(layout, source_tp, target_tp):
    pair = VerifyingPair(layout, source_tp, target_tp)
    incoming = pair.expect()
    await pair.bring(incoming)
    await pair.receiver.arrived(incoming)
    assert incoming.expected.payload_bytes == 3 * layout.all_layers * 4
    pair.check()


async def test_a_hidden_state_follows_the_digests():
    hidden = bytes(range(200))
    pair = VerifyingPair(DRAFTED, hidden_bytes=len(hidden))
    incoming = pair.expect()
    await pair.bring(incoming, hidden)
    assert incoming.expected.payload_bytes == 3 * 5 * 4 + len(hidden)
    assert await pair.receiver.arrived(incoming) == hidden
    pair.check()


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 4), (4, 1)])
@pytest.mark.parametrize(("position", "layer"), [(0, 0), (1, 2), (2, 1)])
async def test_a_flipped_byte_is_found_and_its_page_and_layer_named(source_tp, target_tp, position, layer):
    pair = VerifyingPair(SHARDED, source_tp, target_tp)
    incoming = pair.expect()
    await pair.bring(incoming)
    page = pair.pool.pages(ATTEMPT)[position]
    region = pair.to_regions[-1].memory
    region[pair.there.offset(layer, page, PAGES_THERE) + pair.there.page_bytes - 1] ^= 1
    with pytest.raises(
        AttemptFailed, match=rf"page {page} \(number {position} of the prompt\), layer {layer}"
    ) as error:
        await pair.receiver.arrived(incoming)
    assert (error.value.stage, error.value.retryable) == ("transfer", True)


async def test_a_tail_without_digests_is_refused_where_they_are_expected():
    pair = VerifyingPair(SHARDED)
    incoming = pair.expect()
    outgoing = await pair.send(Pair.prefill(pair, incoming))
    finishing = asyncio.create_task(pair.sender.finish(outgoing, SOURCE_PAGES))
    await asyncio.sleep(0)
    pair.land()
    await finishing
    with pytest.raises(AttemptFailed, match="payload bytes is 0, expected 36"):
        await pair.receiver.arrived(incoming)


async def test_a_prefiller_that_makes_no_digests_says_so():
    pair = Pair()
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming, digests=True))
    with pytest.raises(MeshError, match="asks for digests"):
        await pair.sender.finish(outgoing, SOURCE_PAGES)


def test_digests_cover_exactly_what_is_written():
    """Of a rank that gets half of another's heads: bytes of the other half do not count."""
    layout, half = shard_layout(SHARDED, 1), runs(SHARDED, 1, 2, ATTEMPT)[:2]
    memory = bytearray(layout.region_bytes(1))
    before = PageDigests([memoryview(memory)], layout, 1).take_now([0], at_source(half))
    memory[layout.head_bytes * 3] ^= 1
    assert PageDigests([memoryview(memory)], layout, 1).take_now([0], at_source(half)) == before
    memory[0] ^= 1
    after = PageDigests([memoryview(memory)], layout, 1).take_now([0], at_source(half))
    assert first_difference(layout, before, after) == (0, 0)
    assert len(after) == digests_bytes(layout, 1)
    assert {piece.rank for piece in at_target(half)} == {0}


def test_a_difference_is_found_in_place_and_in_length():
    words = array("I", range(6)).tobytes()
    assert first_difference(SHARDED, words, words) is None
    for index in range(6):
        other = bytearray(words)
        other[index * 4 + 3] = 9
        assert first_difference(SHARDED, words, bytes(other)) == divmod(index, 3)
    assert first_difference(SHARDED, words, words[:20]) == (1, 2)


def test_mapped_regions_are_seen_as_they_change():
    fd = os.memfd_create("kv")
    os.ftruncate(fd, SHARDED.region_bytes(2))
    piece = digests.Piece(0, 0, SHARDED.page_bytes)
    memory = PageDigests.mapped([fd], SHARDED, 2)
    writer = mmap.mmap(fd, SHARDED.region_bytes(2))
    os.close(fd)
    before = memory.take_now([1, 0], [piece])
    writer[SHARDED.offset(2, 0, 2)] = 1
    assert first_difference(SHARDED, before, memory.take_now([1, 0], [piece])) == (1, 2)
    writer.close()
