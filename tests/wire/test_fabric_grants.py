"""A grant lets one attempt write to one range, and ends: a descriptor that is kept opens nothing."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import FabricError, PeerLost, RemoteAccessError
from shared.transfer.fabric import Fabric
from shared.transfer.handles import Connection
from tests.wire.fabric_rig import DEADLINE_S, LostPeers, Memory, open_fabric, paged
from tests.wire.test_fabric_refusal import forge

PAGE, PAGES = 4096, 8


async def write_page(here: Fabric, peer: Connection, source: Memory, descriptor: bytes, offset: int) -> None:
    await here.write(peer, source.region, 0, descriptor, offset, PAGE, 7, timeout_s=DEADLINE_S).wait()


async def test_an_expired_descriptor_writes_nothing_and_its_holder_hears_of_it() -> None:
    async with open_fabric("tcp") as here, open_fabric("tcp") as there:
        source, target = Memory(here, PAGE), Memory(there, PAGES * PAGE)
        source.bytes[:] = b"\xee" * PAGE
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        lost = LostPeers(here)
        mine, other = (target.region.grant(0, PAGES * PAGE) for _ in range(2))
        assert len({mine.descriptor, other.descriptor, target.descriptor}) == 3
        await write_page(here, peer, source, mine.descriptor, mine.offset)
        mine.close()
        mine.close()
        await write_page(here, peer, source, other.descriptor, other.offset + PAGE)
        pattern = target.bytes[:] = bytes(range(256)) * (PAGES * PAGE // 256)
        with pytest.raises(RemoteAccessError) as caught:
            await write_page(here, peer, source, mine.descriptor, 0)
        assert caught.value.peer == peer.identity
        await lost.wait(peer.identity)
        assert target.bytes[:] == pattern
        # The honest part of it goes on, over a new connection.
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        await write_page(here, peer, source, other.descriptor, other.offset + 2 * PAGE)
        assert target.bytes[2 * PAGE : 3 * PAGE] == source.bytes[:]


async def test_a_grant_that_ends_in_the_middle_of_a_transfer() -> None:
    async with open_fabric("tcp", identity=55) as here, open_fabric("tcp") as there:
        lost, length = LostPeers(there), 256 * PAGE
        source, target = Memory(here, length), Memory(there, length)
        source.bytes[:] = b"\xee" * length
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        grant = target.region.grant(0, length)
        begun = there.expect(1, 1)
        plan = paged(peer, source, grant.descriptor, [*range(256)] * 400, page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            grant.close()
            with pytest.raises((RemoteAccessError, PeerLost)):
                await transfer.wait()
        await lost.wait(55)
        arrived = there.stats().arrived
        assert 0 < arrived < 256 * 400
        target.bytes[:] = bytes(length)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        await here.write(peer, source.region, 0, target.descriptor, 0, PAGE, 2, timeout_s=DEADLINE_S).wait()
        assert target.bytes[PAGE:] == bytes(length - PAGE)
        assert there.stats().arrived == arrived + 1


@pytest.mark.parametrize("at", [-1, PAGE - 1, PAGE])
async def test_a_grant_is_no_larger_than_its_range(at: int) -> None:
    async with open_fabric("tcp") as here, open_fabric("tcp") as there:
        source, target = Memory(here, PAGE), Memory(there, PAGES * PAGE)
        source.bytes[:] = b"\xee" * PAGE
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        grant = target.region.grant(3 * PAGE, PAGE)
        assert grant.offset == 0
        await write_page(here, peer, source, grant.descriptor, 0)
        landed = bytes(3 * PAGE) + b"\xee" * PAGE + bytes(4 * PAGE)
        assert target.bytes[:] == landed
        with pytest.raises(RemoteAccessError, match="ends past its target region"):
            await write_page(here, peer, source, grant.descriptor, max(at, 1))
        # One who lies about its length to get past that check fails at the target.
        with pytest.raises(RemoteAccessError):
            await write_page(here, peer, source, forge(grant.descriptor, length=1 << 40), at % (1 << 30))
        assert target.bytes[:] == landed


async def test_a_grant_made_before_its_peer_connects_is_good() -> None:
    async with open_fabric("tcp") as here, open_fabric("tcp") as there:
        source, target = Memory(here, PAGE), Memory(there, PAGE)
        grant = target.region.grant(0, PAGE)
        content = source.fill_random()
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        await write_page(here, peer, source, grant.descriptor, 0)
        assert target.bytes[:] == content


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, PAGE + 1), (PAGE, 1), (1, PAGE), (2**63, 2**63)])
async def test_what_cannot_be_granted(offset: int, length: int) -> None:
    async with open_fabric("tcp") as here:
        with pytest.raises(FabricError, match="ends past its region"):
            Memory(here, PAGE).region.grant(offset, length)


async def test_closing_late_is_nothing() -> None:
    """After its region, and after the fabric."""
    async with open_fabric("tcp") as here:
        memory = Memory(here, PAGE)
        first, second = memory.region.grant(0, PAGE), memory.region.grant(0, PAGE)
        memory.region.close()
        first.close()
    second.close()
