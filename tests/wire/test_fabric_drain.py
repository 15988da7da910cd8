"""Cancel, deadlines, fences and closing: after each of them nothing is on its way any more."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time

import pytest

from shared.errors import FabricError, FabricUnavailable, PeerLost, PeerUnreachable, TransferCancelled, TransferTimeout
from tests.wire.fabric_rig import (
    DEADLINE_S,
    PROVIDERS,
    LostPeers,
    Memory,
    OtherProcess,
    RemoteError,
    open_fabric,
    other_process,
    paged,
)

pytestmark = pytest.mark.parametrize("provider", PROVIDERS)

PAGES, PAGE = 256, 65536


async def test_cancel_drains_what_was_posted_and_posts_no_more(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        begun = there.expect(1, 1)
        plan = paged(peer, source, target.descriptor, [*range(PAGES)] * 100, page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
        transfer.cancel()
        transfer.cancel()
        with pytest.raises(TransferCancelled):
            await transfer.wait()
        transfer.cancel()
        stats = here.stats()
        assert 0 < transfer.report.writes == stats.posted == stats.completed < PAGES * 100
        # It has landed, all of it, and nothing lands any more.
        target.bytes[:] = bytes(PAGES * PAGE)
        source.bytes[:] = b"\1" * len(source.bytes)
        marker = there.expect(2, 1)
        await here.write(peer, source.region, 0, target.descriptor, 0, PAGE, 2, timeout_s=DEADLINE_S).wait()
        async with asyncio.timeout(DEADLINE_S):
            await marker.wait()
        assert target.bytes[PAGE:] == bytes((PAGES - 1) * PAGE)
        assert there.stats().arrived == stats.posted + 1


async def test_cancelling_the_waiter_leaves_the_transfer_alone(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        plan = paged(peer, source, target.descriptor, [*range(PAGES)] * 10, page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(transfer.wait(), 0.001)
        assert (await transfer.wait()).writes == PAGES * 10


async def test_a_deadline_of_a_live_peer_keeps_the_connection(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        plan = paged(
            peer,
            source,
            target.descriptor,
            [*range(PAGES)] * 400,
            page_bytes=PAGE,
            immediate=1,
            timeout_s=0.05,
        )
        with pytest.raises(TransferTimeout):
            await here.write_pages(plan).wait()
        stats = here.stats()
        assert stats.posted == stats.completed
        await here.write(peer, source.region, 0, target.descriptor, 0, PAGE, 2, timeout_s=DEADLINE_S).wait()


async def test_a_deadline_of_a_stopped_peer_ends_the_connection(provider: str) -> None:
    async with open_fabric(provider) as here, other_process(provider, length=PAGES * PAGE) as there:
        lost, source = LostPeers(here), Memory(here, PAGES * PAGE)
        about = await there.call("about")
        peer = await here.connect(bytes.fromhex(about["address"]), timeout_s=DEADLINE_S)
        there.signal(signal.SIGSTOP)
        await there.stopped()
        started = time.monotonic()
        target = bytes.fromhex(about["descriptor"])
        plan = paged(peer, source, target, [*range(PAGES)] * 4, page_bytes=PAGE, immediate=1, timeout_s=0.2)
        with pytest.raises((TransferTimeout, PeerLost)):
            await here.write_pages(plan).wait()
        assert time.monotonic() - started < 2.0
        await lost.wait(peer.identity)
        # The peer wakes, learns that it was given up, and can be reached again.
        there.signal(signal.SIGCONT)
        again = await here.connect(bytes.fromhex(about["address"]), timeout_s=DEADLINE_S)
        await here.write(again, source.region, 0, target, 0, PAGE, 2, timeout_s=DEADLINE_S).wait()


async def begin_writing(writer: OtherProcess, address: bytes, descriptor: bytes) -> asyncio.Future[object]:
    await writer.call("fill", byte=0xAA)
    await writer.call("connect", address=address.hex(), timeout_s=DEADLINE_S)
    return writer.start(
        "write_pages",
        target=descriptor.hex(),
        pages=16,
        page_bytes=1 << 20,
        immediate=1,
        timeout_s=DEADLINE_S,
        repeat=10_000,
    )


@pytest.mark.parametrize("after", [1, 50, 51, 120])
async def test_nothing_lands_after_a_fence(provider: str, after: int) -> None:
    """The writer is stopped in the middle of a long transfer, with its window full of posted writes, some of them in
    sockets, and one received in part. After the fence its memory is ours: not a byte changes when the writer goes on."""
    length = 16 << 20
    async with open_fabric(provider, identity=77) as here, other_process(provider, length=length) as writer:
        target = Memory(here, length)
        identity = int((await writer.call("about"))["identity"])
        begun = here.expect(1, after)
        writing = await begin_writing(writer, here.address, target.descriptor)
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
        writer.signal(signal.SIGSTOP)
        await writer.stopped()
        async with asyncio.timeout(1.0):
            await here.fence(identity)
        pattern = target.bytes[:] = bytes(range(256)) * (length // 256)
        arrived = here.stats().arrived
        writer.signal(signal.SIGCONT)
        with pytest.raises(RemoteError, match=rf"PeerLost.*\(peer {77:016x}\)"):
            async with asyncio.timeout(DEADLINE_S):
                await writing
        assert target.bytes[:] == pattern
        assert here.stats().arrived == arrived


async def test_a_fenced_peer_comes_back_only_with_a_new_address(provider: str) -> None:
    """Work that was handed out before the fence, with the address of then, cannot be done after it."""
    async with open_fabric(provider, identity=1) as here, open_fabric(provider) as there:
        source, target = Memory(here, 64), Memory(there, 64)
        before = there.address
        peer = await here.connect(before, timeout_s=DEADLINE_S)
        lost = LostPeers(here)
        await there.fence(1)
        await lost.wait(peer.identity)
        with pytest.raises(PeerUnreachable, match="from before this peer was fenced"):
            await here.connect(before, timeout_s=DEADLINE_S)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        with pytest.raises(PeerUnreachable, match="from before"):
            await here.connect(before, timeout_s=DEADLINE_S)
        await here.write(peer, source.region, 0, target.descriptor, 0, 64, 1, timeout_s=DEADLINE_S).wait()
        # A third process, which was never fenced, may use any.
        async with open_fabric(provider) as third:
            await third.connect(before, timeout_s=DEADLINE_S)


async def test_a_fence_of_nobody_is_done_at_once(provider: str) -> None:
    async with open_fabric(provider) as here:
        async with asyncio.timeout(1.0):
            await here.fence(12345)


async def test_fencing_ends_our_own_transfers_to_that_peer(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        lost = LostPeers(here)
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        plan = paged(peer, source, target.descriptor, [*range(PAGES)] * 100, page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        await here.fence(peer.identity)
        with pytest.raises(PeerLost):
            here.write_pages(plan)
        with pytest.raises(PeerLost):
            await transfer.wait()
        target.bytes[:] = bytes(len(target.bytes))
        source.bytes[:] = b"\1" * len(source.bytes)
        assert lost.seen == []
        again = await here.connect(there.address, timeout_s=DEADLINE_S)
        await here.write(again, source.region, 0, target.descriptor, 0, PAGE, 2, timeout_s=DEADLINE_S).wait()
        assert target.bytes[PAGE:] == bytes((PAGES - 1) * PAGE)


@pytest.mark.parametrize("order", [*itertools.permutations(["here", "there", "source", "target"])], ids="-".join)
async def test_closing_in_any_order_while_busy(provider: str, order: tuple[str, ...]) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGES * PAGE), Memory(there, PAGES * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        begun = there.expect(1, 10)
        never = there.expect(2, 1)
        plan = paged(peer, source, target.descriptor, [*range(PAGES)] * 100, page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            for name in order:
                if name == "here":
                    await here.close()
                elif name == "there":
                    await there.close()
                else:
                    (source if name == "source" else target).region.close()
            with pytest.raises(FabricError):
                await transfer.wait()
            with pytest.raises(FabricError, match="closed"):
                await never.wait()
        never.close()
        with pytest.raises(FabricError):
            here.write_pages(plan)
        for fabric in (here, there):
            with pytest.raises(FabricUnavailable, match="closed"):
                fabric.expect(3, 1)


async def test_many_close_at_once(provider: str) -> None:
    async with open_fabric(provider) as here:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(here.close(), here.close(), here.close())


async def test_a_forked_child_is_refused_and_does_no_harm(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGE), Memory(there, PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        child = os.fork()
        if child == 0:
            try:
                here.expect(1, 1)
            except FabricUnavailable as error:
                os._exit(0 if "forked child" in str(error) else 2)
            os._exit(1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await here.write(peer, source.region, 0, target.descriptor, 0, PAGE, 1, timeout_s=DEADLINE_S).wait()
