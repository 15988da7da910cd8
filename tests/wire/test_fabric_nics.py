"""The contract over several NICs: what is spread is one transfer, one count and one peer."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from shared.errors import FabricUnavailable, PeerLost, RemoteAccessError, TransferCancelled
from shared.transfer.fabric import Fabric
from shared.transfer.topology import NicGroup
from tests.wire.fabric_rig import DEADLINE_S, HOSTS, LostPeers, Memory, new_identity, open_fabric, other_process, paged

PAGES, PAGE, LAYERS = 60, 16384, 3
APART = [NicGroup(nics=("127.0.0.1",), cpus=(0,)), NicGroup(nics=("127.0.0.2",), cpus=())]
"""Two NICs with a thread each."""


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 2), (3, 3), (1, 3), (2, 1), (3, 2)])
async def test_all_arrive_and_every_nic_works(ours: int, theirs: int) -> None:
    stride = PAGES * PAGE
    async with open_fabric("tcp", host=HOSTS[ours]) as here, open_fabric("tcp", host=HOSTS[theirs]) as there:
        source, target = Memory(here, LAYERS * stride), Memory(there, LAYERS * stride)
        content = source.fill_random()
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        arrival = there.expect(1, LAYERS * PAGES)
        plan = paged(
            peer,
            source,
            target.descriptor,
            random.Random(1).sample(range(PAGES), PAGES),
            page_bytes=PAGE,
            immediate=1,
            layers=LAYERS,
            source_stride=stride,
            target_stride=stride,
        )
        report = await here.write_pages(plan).wait()
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert (report.writes, report.bytes, len(report.layers)) == (LAYERS * PAGES, LAYERS * stride, LAYERS)
        assert target.bytes[:] == content
        assert there.stats().arrived == LAYERS * PAGES
        nics = here.stats().nics
        assert sum(writes for writes, _ in nics) == LAYERS * PAGES
        if max(ours, theirs) % ours == 0:
            assert nics == [(LAYERS * PAGES // ours, LAYERS * stride // ours)] * ours


async def test_short_lists_take_turns() -> None:
    """A list of one page goes to the NIC that was given least, in bytes."""
    async with open_fabric("tcp", host=HOSTS[2]) as here, open_fabric("tcp", host=HOSTS[2]) as there:
        source, target = Memory(here, 4 * PAGE), Memory(there, 4 * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        for length in (4 * PAGE, PAGE, PAGE, PAGE, PAGE):
            await here.write(peer, source.region, 0, target.descriptor, 0, length, 1, timeout_s=DEADLINE_S).wait()
        assert here.stats().nics == [(1, 4 * PAGE), (4, 4 * PAGE)]


async def test_cancel_drains_on_every_nic() -> None:
    async with open_fabric("tcp", groups=APART) as here, open_fabric("tcp", host=HOSTS[2]) as there:
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        begun = there.expect(1, 3000)
        transfer = here.write_pages(
            paged(peer, source, target.descriptor, [*range(PAGES)] * 500, page_bytes=PAGE, immediate=1)
        )
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
        transfer.cancel()
        with pytest.raises(TransferCancelled):
            await transfer.wait()
        stats = here.stats()
        assert 0 < transfer.report.writes == stats.posted == stats.completed < PAGES * 500
        assert all(writes > 0 for writes, _ in stats.nics)
        target.bytes[:] = bytes(len(target.bytes))
        source.bytes[:] = b"\1" * len(source.bytes)
        marker = there.expect(2, 2)
        plan = paged(peer, source, target.descriptor, [0, 1], page_bytes=PAGE, immediate=2)
        await here.write_pages(plan).wait()
        async with asyncio.timeout(DEADLINE_S):
            await marker.wait()
        assert target.bytes[2 * PAGE :] == bytes((PAGES - 2) * PAGE)
        assert there.stats().arrived == stats.posted + 2


@pytest.mark.parametrize("nic", [0, 1])
async def test_a_refusal_on_one_nic_loses_the_peer(nic: int) -> None:
    async with open_fabric("tcp", groups=APART) as here, open_fabric("tcp", host=HOSTS[2]) as there:
        lost, source, target = LostPeers(here), Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        forged = bytearray(target.descriptor)
        forged[24 + 16 * nic + 8] ^= 1  # a bit of that NIC's key
        plan = paged(peer, source, bytes(forged), [0, 1], page_bytes=PAGE, immediate=1)
        with pytest.raises(RemoteAccessError):
            await here.write_pages(plan).wait()
        await lost.wait(peer.identity)
        with pytest.raises(PeerLost):
            here.write_pages(plan)
        again = await here.connect(there.address, timeout_s=DEADLINE_S)
        good = paged(again, source, target.descriptor, [*range(PAGES)], page_bytes=PAGE, immediate=2)
        assert (await here.write_pages(good).wait()).writes == PAGES


async def test_nothing_lands_over_any_nic_after_a_fence() -> None:
    length = 16 << 20
    async with (
        open_fabric("tcp", host=HOSTS[3]) as here,
        other_process("tcp", length=length, host=HOSTS[2]) as writer,
    ):
        target = Memory(here, length)
        identity = int((await writer.call("about"))["identity"])
        begun = here.expect(1, 50)
        await writer.call("fill", byte=0xAA)
        await writer.call("connect", address=here.address.hex(), timeout_s=DEADLINE_S)
        writing = writer.start(
            "write_pages",
            target=target.descriptor.hex(),
            pages=16,
            page_bytes=1 << 20,
            immediate=1,
            timeout_s=DEADLINE_S,
            repeat=10_000,
        )
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
        writer.signal(signal.SIGSTOP)
        await writer.stopped()
        async with asyncio.timeout(1.0):
            await here.fence(identity)
        target.bytes[:] = bytes(length)
        arrived = here.stats().arrived
        writer.signal(signal.SIGCONT)
        with pytest.raises(Exception, match="PeerLost"):
            async with asyncio.timeout(DEADLINE_S):
                await writing
        assert target.bytes[:] == bytes(length)
        assert here.stats().arrived == arrived


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_that_ends_is_lost_on_every_nic(end: signal.Signals) -> None:
    async with open_fabric("tcp", groups=APART) as here:
        lost, source = LostPeers(here), Memory(here, PAGES * PAGE)
        async with other_process("tcp", length=PAGES * PAGE, host=HOSTS[3]) as there:
            about = await there.call("about")
            peer = await here.connect(bytes.fromhex(about["address"]), timeout_s=DEADLINE_S)
            target = bytes.fromhex(about["descriptor"])
            begun = there.start("expect", immediate=1, count=PAGES)
            transfer = here.write_pages(
                paged(peer, source, target, [*range(PAGES)] * 1000, page_bytes=PAGE, immediate=1)
            )
            await begun
            there.signal(end)
            await lost.wait(peer.identity)
            with pytest.raises(PeerLost):
                await asyncio.wait_for(transfer.wait(), DEADLINE_S)
        assert len(lost.seen) == 1


@pytest.mark.parametrize("first", ["here", "there", "region"])
async def test_closing_while_busy(first: str) -> None:
    async with open_fabric("tcp", groups=APART) as here, open_fabric("tcp", host=HOSTS[3]) as there:
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        begun = there.expect(1, 10)
        plan = paged(peer, source, target.descriptor, [*range(PAGES)] * 500, page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            if first == "region":
                source.region.close()
            await (there if first == "there" else here).close()
            with pytest.raises(Exception, match=r"closed|lost|broke"):
                await transfer.wait()


async def test_what_cannot_be_a_nic() -> None:
    for provider, host, says in [
        ("shm", HOSTS[2], "one NIC"),
        ("tcp", "127.0.0.1,192.0.2.254", "192.0.2.254|assign"),
        ("tcp", "127.0.0.1,", "address|resolve"),
    ]:
        with pytest.raises(FabricUnavailable, match=says):
            await Fabric.open(provider=provider, host=host, identity=new_identity())
    with pytest.raises(FabricUnavailable, match="no-such-device"):
        await Fabric.open(
            provider="tcp", host="127.0.0.1", identity=new_identity(), groups=[NicGroup(nics=("no-such-device",))]
        )
