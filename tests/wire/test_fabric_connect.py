"""Connections come up, or fail in time with a reason."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from shared.errors import FabricError, FabricUnavailable, PeerLost, PeerUnreachable
from shared.transfer.fabric import Fabric, library_version, providers
from tests.wire.fabric_rig import DEADLINE_S, PROVIDERS, LostPeers, Memory, new_identity, open_fabric

ADDRESS = struct.Struct("<3sBQQHH")  # magic, version, identity, generation, port, NICs


def address_of(
    host: str, port: int, *, identity: int = 1, provider: str = "tcp", generation: int = 0, version: int = 2
) -> bytes:
    texts = b"".join(struct.pack("<H", len(text)) + text.encode() for text in (host, provider))
    return ADDRESS.pack(b"KVA", version, identity, generation, port, 1) + texts


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<IB", len(payload) + 1, kind) + payload


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[int]:
    """A listener that is no fabric: its port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def hangs_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def babbles(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await writer.drain()


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_providers_of_every_linux_machine_are_here() -> None:
    major = library_version().split(".")[0]
    assert major in ("1", "2")
    # Of 2.x the shm provider is not offered.
    assert {"tcp", "shm"} & set(providers()) == ({"tcp", "shm"} if major == "1" else {"tcp"})


@pytest.mark.skipif(library_version().startswith("1."), reason="libfabric 1.x has a sound shm")
async def test_shm_of_libfabric_2_is_refused_with_the_reason() -> None:
    with pytest.raises(FabricUnavailable, match="not safe to close while busy"):
        await Fabric.open(provider="shm", host="127.0.0.1", identity=1)


@pytest.mark.case("F7")
async def test_nobody_there_is_an_error_in_time_with_the_address(provider: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        async with open_fabric(provider) as fabric:
            started = time.monotonic()
            with pytest.raises(PeerUnreachable, match=rf"127\.0\.0\.1 port {port} in time: Connection refused"):
                await fabric.connect(address_of("127.0.0.1", port, provider=provider), timeout_s=0.4)
            assert 0.3 < time.monotonic() - started < 1.0


@pytest.mark.parametrize("handler", [silent, hangs_up, babbles])
async def test_something_else_there_never_hangs(handler: Handler) -> None:
    async with open_fabric("tcp") as fabric, server(handler) as port:
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match="in time"):
            await fabric.connect(address_of("127.0.0.1", port), timeout_s=0.4)
        assert time.monotonic() - started < 1.0


async def test_a_peer_that_comes_late_is_reached(provider: str) -> None:
    """`connect` goes on trying: here the address exists before its listener does."""
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        upstream = there.address
        port = ADDRESS.unpack_from(upstream)[4]

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(4096):
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            late = reserved.getsockname()[1]
        address = ADDRESS.pack(b"KVA", 2, ADDRESS.unpack_from(upstream)[2], 0, late, 1) + upstream[ADDRESS.size :]
        connecting = asyncio.ensure_future(here.connect(address, timeout_s=DEADLINE_S))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(connecting), 0.15)
        listener = await asyncio.start_server(forward, "127.0.0.1", late)
        peer = await connecting
        assert peer.identity == ADDRESS.unpack_from(upstream)[2]
        listener.close()


async def test_another_provider_is_refused_by_name(provider: str) -> None:
    other = next(name for name in providers() if name != provider)
    async with open_fabric(provider) as here, open_fabric(other) as there:
        with pytest.raises(PeerUnreachable, match=f"the peer has provider {other}, this side has {provider}"):
            await here.connect(there.address, timeout_s=DEADLINE_S)
        # Also when the address lies about it.
        identity, _, port, _ = ADDRESS.unpack_from(there.address)[2:]
        with pytest.raises(PeerUnreachable, match=f"provider {provider}, this side has {other}"):
            await here.connect(
                address_of("127.0.0.1", port, identity=identity, provider=provider), timeout_s=DEADLINE_S
            )


async def test_a_provider_that_is_no_text_is_refused_by_name() -> None:
    async with open_fabric("tcp") as here, open_fabric("tcp") as there:
        spoiled = there.address.replace(b"tcp", b"t\xa4p")
        assert spoiled != there.address
        with pytest.raises(PeerUnreachable, match="the peer has provider t\ufffdp, this side has tcp"):
            await here.connect(spoiled, timeout_s=DEADLINE_S)


@pytest.mark.case("F3")
async def test_another_incarnation_is_refused(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider, identity=5) as there:
        port = ADDRESS.unpack_from(there.address)[4]
        with pytest.raises(PeerUnreachable, match="another incarnation"):
            await here.connect(address_of("127.0.0.1", port, identity=4, provider=provider), timeout_s=DEADLINE_S)


async def test_another_protocol_version_is_refused() -> None:
    async with open_fabric("tcp") as fabric:
        port = ADDRESS.unpack_from(fabric.address)[4]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frame(1, b"KVMF" + struct.pack("<H", 9) + b"whatever version 9 says"))
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        assert answer[4] == 3
        assert answer[5:] == b"fabric protocol 9, this side speaks 2"
        writer.close()


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", frame(1, b"KVMF"), frame(1, b""), b"\0\0\0\0", b"\xff" * 64]
)
async def test_strangers_are_dropped(noise: bytes) -> None:
    async with open_fabric("tcp") as here, open_fabric("tcp") as there:
        port = ADDRESS.unpack_from(there.address)[4]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        async with asyncio.timeout(DEADLINE_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        await here.connect(there.address, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("address", [b"", b"KVA", address_of("127.0.0.1", 1)[:-1], address_of("h", 1, version=1)])
async def test_what_is_no_address(address: bytes) -> None:
    async with open_fabric("tcp") as fabric:
        with pytest.raises(PeerUnreachable, match="no fabric address"):
            await fabric.connect(address, timeout_s=DEADLINE_S)


@pytest.mark.case("F8")
async def test_concurrent_calls_share_one_connection(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        peers = await asyncio.gather(*(here.connect(there.address, timeout_s=DEADLINE_S) for _ in range(10)))
        assert {id(peer) for peer in peers} == {id(peers[0])}
        assert await here.connect(there.address, timeout_s=DEADLINE_S) is peers[0]
        # The other side uses the same connection back.
        back = await there.connect(here.address, timeout_s=DEADLINE_S)
        source, target = Memory(there, 4096), Memory(here, 4096)
        arrival = here.expect(1, 1)
        await there.write(back, source.region, 0, target.descriptor, 0, 4096, 1, timeout_s=DEADLINE_S).wait()
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()


async def test_one_of_many_waiters_may_give_up(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        hasty = asyncio.ensure_future(here.connect(there.address, timeout_s=DEADLINE_S))
        patient = asyncio.ensure_future(here.connect(there.address, timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        hasty.cancel()
        assert (await patient).identity == ADDRESS.unpack_from(there.address)[2]
        with pytest.raises(asyncio.CancelledError):
            await hasty


async def test_both_sides_connect_at_once_again_and_again(provider: str) -> None:
    async with open_fabric(provider) as here:
        lost = LostPeers(here)
        for _ in range(10):
            async with open_fabric(provider) as there:
                theirs = LostPeers(there)
                one, other = await asyncio.gather(
                    here.connect(there.address, timeout_s=DEADLINE_S),
                    there.connect(here.address, timeout_s=DEADLINE_S),
                )
                source, target = Memory(here, 64), Memory(there, 64)
                await here.write(one, source.region, 0, target.descriptor, 0, 64, 1, timeout_s=DEADLINE_S).wait()
                await there.write(other, target.region, 0, source.descriptor, 0, 64, 1, timeout_s=DEADLINE_S).wait()
            await lost.wait(one.identity)
            assert theirs.seen == []
        assert len(lost.seen) == 10


async def test_a_peer_that_closed_is_lost_once_and_can_come_back(provider: str) -> None:
    identity = new_identity()
    async with open_fabric(provider) as here:
        lost = LostPeers(here)
        async with open_fabric(provider, identity=identity) as there:
            first = await here.connect(there.address, timeout_s=DEADLINE_S)
        error = await lost.wait(identity)
        assert "closed" in error.message
        async with open_fabric(provider, identity=identity) as there:
            second = await here.connect(there.address, timeout_s=DEADLINE_S)
            source, target = Memory(here, 64), Memory(there, 64)
            with pytest.raises(PeerLost):
                here.write(first, source.region, 0, target.descriptor, 0, 64, 1, timeout_s=DEADLINE_S)
            await here.write(second, source.region, 0, target.descriptor, 0, 64, 1, timeout_s=DEADLINE_S).wait()
        assert lost.seen[0][0] == identity


async def test_an_exception_in_a_callback_stops_nothing(provider: str) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with open_fabric(provider) as here:

        def fails(_: int, __: FabricError) -> None:
            raise ValueError("of the callback")

        here.on_peer_lost(fails)
        lost = LostPeers(here)
        async with open_fabric(provider) as there:
            peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        await lost.wait(peer.identity)
        async with open_fabric(provider) as there:
            await here.connect(there.address, timeout_s=DEADLINE_S)
    assert [type(context["exception"]) for context in reported] == [ValueError, ValueError]


@pytest.mark.parametrize(
    ("name", "host", "text"),
    [
        ("carrier-pigeon", "127.0.0.1", "takes tcp, shm or libfabric:<name>"),
        ("libfabric:psm9", "127.0.0.1", "has no provider 'psm9'"),
        ("tcp", "0.0.0.0", "no address that peers can reach"),
        ("tcp", "192.0.2.1", r"192\.0\.2\.1"),
        ("tcp", "no such host", "does not resolve"),
    ],
)
async def test_what_cannot_be_opened(name: str, host: str, text: str) -> None:
    with pytest.raises(FabricUnavailable, match=text):
        await Fabric.open(provider=name, host=host, identity=1)


async def test_a_name_is_announced_as_it_was_given() -> None:
    async with open_fabric("tcp", host="localhost") as there, open_fabric("tcp") as here:
        assert b"localhost" in there.address
        await here.connect(there.address, timeout_s=DEADLINE_S)
        with pytest.raises(PeerUnreachable, match="own"):
            await here.connect(here.address, timeout_s=DEADLINE_S)
