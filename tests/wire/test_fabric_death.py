"""A peer that dies, or stops, is noticed within two seconds, whatever it was doing; what was outstanding ends."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from shared.errors import FabricUnavailable, PeerLost, PeerUnreachable
from shared.transfer.fabric import Fabric
from tests.wire.fabric_rig import (
    DEADLINE_S,
    NOTICED_S,
    PROVIDERS,
    LostPeers,
    Memory,
    open_fabric,
    other_process,
    paged,
)

pytestmark = pytest.mark.parametrize("provider", PROVIDERS)

PAGES, PAGE = 256, 65536
ENDS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_the_target_ends(provider: str, busy: bool, end: signal.Signals) -> None:
    async with open_fabric(provider) as here:
        lost, source = LostPeers(here), Memory(here, PAGES * PAGE)
        async with other_process(provider, length=PAGES * PAGE) as there:
            about = await there.call("about")
            address, descriptor = bytes.fromhex(about["address"]), bytes.fromhex(about["descriptor"])
            peer = await here.connect(address, timeout_s=DEADLINE_S)
            plan = paged(peer, source, descriptor, [*range(PAGES)] * (40 if busy else 1), page_bytes=PAGE, immediate=1)
            begun = there.start("expect", immediate=1, count=PAGES)
            transfer = here.write_pages(plan)
            await begun
            if not busy:
                await transfer.wait()
            started = time.monotonic()
            there.signal(end)
            error = await lost.wait(peer.identity)
            if busy:
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(transfer.wait(), NOTICED_S[provider])
            assert time.monotonic() - started < NOTICED_S[provider]
            assert error.peer == peer.identity
            with pytest.raises(PeerLost):
                here.write_pages(plan)
            if end == signal.SIGKILL and not here.stuck:
                with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1 port \d+"):
                    await here.connect(address, timeout_s=0.3)
            process = there.pid
        await works_with_another(provider, here, source)
    assert not [*Path("/dev/shm").glob(f"{process}:*")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_the_initiator_ends(provider: str, busy: bool, end: signal.Signals) -> None:
    async with open_fabric(provider) as here:
        lost, target = LostPeers(here), Memory(here, PAGES * PAGE)
        async with other_process(provider, length=PAGES * PAGE) as there:
            identity = int((await there.call("about"))["identity"])
            await there.call("connect", address=here.address.hex(), timeout_s=DEADLINE_S)
            never = here.expect(1, PAGES * 1000)
            begun = here.expect(2, 1)
            for immediate, repeat in [(2, 1), *([(1, 100)] if busy else [])]:
                there.start(
                    "write_pages",
                    target=target.descriptor.hex(),
                    pages=PAGES,
                    page_bytes=PAGE,
                    immediate=immediate,
                    timeout_s=DEADLINE_S,
                    repeat=repeat,
                )
            await begun.wait()
            started = time.monotonic()
            there.signal(end)
            error = await lost.wait(identity)
            assert time.monotonic() - started < NOTICED_S[provider]
            assert isinstance(error, PeerLost)
            assert not never.done
            never.close()
            # What a stopped initiator had sent may still be here: after the fence it cannot land.
            try:
                await here.fence(identity)
            except FabricUnavailable:
                # A shm peer that was stopped while it held a shared lock: the fabric says so, and its process ends.
                assert here.stuck
                assert provider == "shm"
            process = there.pid
        assert len(lost.seen) == 1
        await works_with_another(provider, here, target)
    assert not [*Path("/dev/shm").glob(f"{process}:*")]


async def works_with_another(provider: str, here: Fabric, memory: Memory) -> None:
    """Except that a shm peer that was killed while it held a shared lock has taken this fabric with it."""
    if here.stuck:
        assert provider == "shm"
        return
    async with open_fabric(provider) as another:
        theirs = Memory(another, PAGE)
        content = memory.fill_random()[:PAGE]
        peer = await here.connect(another.address, timeout_s=DEADLINE_S)
        arrival = another.expect(1, 1)
        await here.write(peer, memory.region, 0, theirs.descriptor, 0, PAGE, 1, timeout_s=DEADLINE_S).wait()
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert theirs.bytes[:] == content
