"""What the target did not offer cannot be written, and the initiator hears of it."""

from __future__ import annotations

import asyncio
import os
import struct

import pytest

from shared.errors import FabricError, PeerLost, RemoteAccessError, TransferTimeout
from shared.transfer.fabric import Fabric
from shared.transfer.handles import Connection
from tests.wire.fabric_rig import DEADLINE_S, PROVIDERS, LostPeers, Memory, open_fabric, paged

pytestmark = pytest.mark.parametrize("provider", PROVIDERS)

PAGE = 8192
HEADER = struct.Struct("<3sBIQQ")  # magic, version, NICs, base, length
NIC = struct.Struct("<QQ")  # address, key


def forge(descriptor: bytes, *, length: int | None = None, key_xor: int = 0) -> bytes:
    magic, version, nics, base, real_length = HEADER.unpack_from(descriptor)
    address, key = NIC.unpack_from(descriptor, HEADER.size)
    return HEADER.pack(magic, version, nics, base, real_length if length is None else length) + NIC.pack(
        address, key ^ key_xor
    )


SHM_REFUSES_NOTHING = (
    "shm checks neither ranges nor revoked keys, so there is nothing to see: it is for trusted peers alone"
)


async def write_with(
    here: Fabric, peer: Connection, source: Memory, descriptor: bytes, offset: int, *, timeout_s: float = DEADLINE_S
) -> None:
    await here.write(peer, source.region, 0, descriptor, offset, PAGE, 77, timeout_s=timeout_s).wait()


@pytest.mark.parametrize("crime", ["key", "range", "revoked"])
async def test_the_target_refuses(provider: str, crime: str) -> None:
    """The initiator gets an error, nothing is written, and a new connection works at once. On shm the provider looks
    neither at keys nor at ranges: there nothing but the descriptor's own length protects."""
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGE), Memory(there, 4 * PAGE)
        source.bytes[:] = b"\xee" * PAGE
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        good = Memory(there, PAGE)
        if provider == "shm":
            if crime != "key":
                pytest.skip(SHM_REFUSES_NOTHING)
            peer = await forge_on_shm(here, there, peer, source, target)
        else:
            forged = {
                "key": (forge(target.descriptor, key_xor=1), 0),
                "range": (forge(target.descriptor, length=1 << 40), 3 * PAGE + 1),
                "revoked": (target.descriptor, 0),
            }
            if crime == "revoked":
                target.region.close()
            lost = LostPeers(here)
            with pytest.raises(RemoteAccessError) as caught:
                await write_with(here, peer, source, *forged[crime])
            assert caught.value.call == "fi_writemsg"
            assert caught.value.code != 0
            assert caught.value.peer == peer.identity
            await lost.wait(peer.identity)
            with pytest.raises(PeerLost):
                await write_with(here, peer, source, good.descriptor, 0)
            peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        assert target.bytes[:] == bytes(4 * PAGE)
        arrival = there.expect(77, 1)
        await write_with(here, peer, source, good.descriptor, 0)
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert good.bytes[:] == source.bytes[:]


async def forge_on_shm(here: Fabric, there: Fabric, peer: Connection, source: Memory, target: Memory) -> Connection:
    """The write never completes, so that it ends by its deadline, with its connection."""
    with pytest.raises(TransferTimeout):
        await write_with(here, peer, source, forge(target.descriptor, key_xor=1), 0, timeout_s=0.5)
    return await here.connect(there.address, timeout_s=DEADLINE_S)


async def test_a_bad_write_takes_only_its_own_connection(provider: str) -> None:
    if provider == "shm":
        pytest.skip(SHM_REFUSES_NOTHING)
    async with open_fabric(provider) as here, open_fabric(provider) as there, open_fabric(provider) as bystander:
        source, target = Memory(here, 64 * PAGE), Memory(there, PAGE)
        other = Memory(bystander, 64 * PAGE)
        content = source.fill_random()
        bad = await here.connect(there.address, timeout_s=DEADLINE_S)
        good = await here.connect(bystander.address, timeout_s=DEADLINE_S)
        arrival = bystander.expect(1, 64)
        plan = paged(good, source, other.descriptor, [*range(64)], page_bytes=PAGE, immediate=1)
        transfer = here.write_pages(plan)
        with pytest.raises(RemoteAccessError):
            await write_with(here, bad, source, forge(target.descriptor, key_xor=1), 0)
        assert (await transfer.wait()).writes == 64
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert other.bytes[:] == content


async def test_a_bad_write_among_good_ones(provider: str) -> None:
    """A stream breaks for all writes behind the bad one: one is refused, the others are lost, none is left."""
    if provider == "shm":
        pytest.skip(SHM_REFUSES_NOTHING)
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 64 * PAGE), Memory(there, 64 * PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)

        def pages(descriptor: bytes) -> asyncio.Task[object]:
            plan = paged(peer, source, descriptor, [*range(16)], page_bytes=PAGE, immediate=1)
            return asyncio.ensure_future(here.write_pages(plan).wait())

        before = pages(target.descriptor)
        bad = pages(forge(target.descriptor, key_xor=1 << 40))
        after = pages(target.descriptor)
        results = await asyncio.gather(before, bad, after, return_exceptions=True)
        assert isinstance(results[2], PeerLost)
        # Where the break outran the acknowledgements of the good writes, the first of those is taken for the bad one.
        assert sum(isinstance(result, RemoteAccessError) for result in results[:2]) == 1
        assert isinstance(results[1], RemoteAccessError | PeerLost)


async def test_malformed_descriptors_are_refused_here(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, PAGE), Memory(there, PAGE)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        good = target.descriptor
        malformed = [
            b"",
            b"KVR",
            good[:-1],
            good + b"\0",
            b"XXX" + good[3:],
            good[:3] + b"\x02" + good[4:],
            good[:4] + struct.pack("<I", 0) + good[8:],
            good[:4] + struct.pack("<I", 1 << 31) + good[8:],
            HEADER.pack(b"KVR", 1, 1, 0, 2**64 - 1) + NIC.pack(PAGE, 1),
        ]
        for descriptor in malformed:
            with pytest.raises(RemoteAccessError, match="malformed"):
                await write_with(here, peer, source, descriptor, 0)
        await write_with(here, peer, source, good, 0)


async def test_what_cannot_be_registered(provider: str) -> None:
    async with open_fabric(provider) as here:
        with pytest.raises(FabricError, match="fstat"):
            here.register(1_000_000, PAGE)
        memory = Memory(here, PAGE)
        for length in (0, PAGE * 2):
            fd = _memfd(PAGE)
            with pytest.raises(FabricError, match="cannot map"):
                here.register(fd, length)
            os.close(fd)
        memory.region.close()
        memory.region.close()


def _memfd(length: int) -> int:
    fd = os.memfd_create("kvmesh-test")
    os.ftruncate(fd, length)
    return fd
