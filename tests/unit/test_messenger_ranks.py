"""The messenger between instances of several ranks: every run of every page, to whoever holds it."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import pytest

from shared.errors import TransferCancelled
from shared.kv import plan
from shared.kv.shards import heads_of
from shared.layout import KvLayout
from shared.transfer.interface import LayerTiming, TransferReport
from tests.unit.test_messenger import (
    ATTEMPT,
    PAGES_HERE,
    PAGES_THERE,
    PROMPT,
    Pair,
)

SHARDED = KvLayout(num_layers=3, num_kv_heads=4, head_dim=1, page_size=4, dtype="float32")
LATENT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=3, page_size=4, dtype="bfloat16", kind="mla")
DRAFTED = msgspec.structs.replace(
    LATENT, draft=KvLayout(num_layers=2, num_kv_heads=4, head_dim=2, page_size=4, dtype="bfloat16")
)
"""A model that is drafted for by one whose heads are others."""


def content(layout: KvLayout, tp: int, rank: int, layer: int, page: int) -> bytes:
    """What a rank's page holds: every byte tells its part, head of the whole model, layer, page and place."""
    group = layout.groups[layout.group_of(layer)]
    return b"".join(
        hashlib.blake2b(repr((layer, page, part, head)).encode(), digest_size=group.head_bytes).digest()
        for part in range(group.parts)
        for head in heads_of(group.num_kv_heads, tp, rank)
    )


def fill(pair: Pair) -> None:
    """The prefiller's pages with their `content`."""
    for rank, region in enumerate(pair.from_regions):
        for layer in range(pair.layout.all_layers):
            for page in range(PAGES_HERE):
                at, its = (
                    pair.here.offset(layer, page, PAGES_HERE),
                    content(pair.layout, pair.source_tp, rank, layer, page),
                )
                region.memory[at : at + len(its)] = its


@pytest.mark.parametrize("layout", [SHARDED, LATENT, DRAFTED], ids=["gqa", "mla", "drafted"])
@pytest.mark.parametrize("source_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("target_tp", [1, 2, 4, 8])
async def test_every_rank_has_its_heads_of_every_page(layout, source_tp, target_tp):
    pair = Pair(layout=layout, source_tp=source_tp, target_tp=target_tp)
    fill(pair)
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    finishing = asyncio.create_task(pair.sender.finish(outgoing))
    await asyncio.sleep(0)
    *pages, last = pair.source.transfers
    for transfer in pages:
        transfer.land()
    assert not pair.target.arrivals[incoming.slot.immediate].done.is_set(), "the tail is still on its way"
    last.land()
    report = await finishing
    await pair.receiver.arrived(incoming)
    for rank, region in enumerate(pair.to_regions):
        for layer in range(layout.all_layers):
            for source, target in zip((5, 0, 2), pair.pool.pages(ATTEMPT), strict=False):
                at, its = pair.there.offset(layer, target, PAGES_THERE), content(layout, target_tp, rank, layer, source)
                assert region.memory[at : at + len(its)] == its
    assert (len(report.chunks), report.tail.writes) == (2, 1)
    assert report.bytes == plan.kv_bytes(layout, PROMPT, target_tp) + report.tail.bytes
    assert sum(chunk.writes for chunk in report.chunks) + 1 == incoming.expected.writes == outgoing.writes
    pair.check()


async def test_draining_cancels_the_writes_of_every_rank():
    pair = Pair(layout=SHARDED, source_tp=2, target_tp=4)
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    await pair.sender.drain(outgoing)
    assert len(outgoing.transfers) == 2 * len(outgoing.runs) == 2 * 8
    for transfer in outgoing.transfers:
        with pytest.raises(TransferCancelled):
            await transfer.wait()


async def test_a_report_spans_the_ranks_of_a_chunk():
    pair = Pair(layout=SHARDED, source_tp=2, target_tp=1)
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    for i, transfer in enumerate(outgoing.transfers):
        transfer._report = TransferReport(1, 10, [LayerTiming(100 - i, 200 + i)])
    finishing = asyncio.create_task(pair.sender.finish(outgoing))
    await asyncio.sleep(0)
    pair.land()
    first, second = (await finishing).chunks
    assert first == TransferReport(4, 40, [LayerTiming(97, 203)])
    assert second == TransferReport(4, 40, [LayerTiming(93, 207)])


async def test_a_report_has_the_layers_of_model_and_draft_one_after_another():
    pair = Pair(layout=DRAFTED)
    incoming = pair.expect()
    outgoing = await pair.send(pair.prefill(incoming))
    for transfer, layers in zip(outgoing.transfers, (3, 2, 3, 2), strict=True):
        transfer._report = TransferReport(1, 10, [LayerTiming(layers, 200 + i) for i in range(layers)])
    finishing = asyncio.create_task(pair.sender.finish(outgoing))
    await asyncio.sleep(0)
    pair.land()
    for chunk in (await finishing).chunks:
        assert [layer.posted_ns for layer in chunk.layers] == [3, 3, 3, 2, 2]
        assert (chunk.writes, chunk.bytes) == (2, 20)
