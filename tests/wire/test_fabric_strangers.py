"""Whatever comes in at the control port, the fabric goes on serving, and what is no peer is closed in time."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.transfer.fabric import Fabric
from tests.wire.fabric_rig import DEADLINE_S, LostPeers, Memory, new_identity, open_fabric
from tests.wire.test_fabric_connect import ADDRESS, frame

HELLO, WELCOME, REJECT, PING = 1, 2, 3, 4
HANDSHAKE_S = 2.0
PAGE = 4096
ENDPOINT = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 9) + bytes([127, 0, 0, 1]) + bytes(8)


def text(value: bytes) -> bytes:
    return struct.pack("<H", len(value)) + value


def hello(fabric: Fabric, **lies: object) -> bytes:
    """A hello to `fabric` that is right but for `lies`."""
    _, _, target, generation, _, nics = ADDRESS.unpack_from(fabric.address)
    said = {"protocol": 2, "provider": b"tcp", "identity": new_identity(), "target": target, "generation": generation}
    said |= {"floor": 0, "nics": nics, "count": None, "rails": [(ENDPOINT, b"")]} | lies
    rails = said["rails"]
    assert isinstance(rails, list)
    count = len(rails) if said["count"] is None else said["count"]
    numbers = [said[name] for name in ("identity", "target", "generation", "floor", "nics")]
    return (
        b"KVMF"
        + struct.pack("<H", said["protocol"])
        + text(said["provider"])  # type: ignore[arg-type]
        + struct.pack("<QQQQHH", *numbers, count)
        + b"".join(text(endpoint) + text(doorbell) for endpoint, doorbell in rails)
    )


def dial(fabric: Fabric, said: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", ADDRESS.unpack_from(fabric.address)[4]), timeout=DEADLINE_S)
    with suppress(OSError):
        made.sendall(said)
    return made


def answer(fabric: Fabric, said: bytes) -> tuple[int, bytes]:
    """The first frame that comes back: its type and payload; (0, b"") where the connection just ends."""
    with dial(fabric, frame(HELLO, said)) as made:
        got = b""
        with suppress(ConnectionResetError):
            while len(got) < 5 or len(got) < 4 + struct.unpack_from("<I", got)[0]:
                if not (more := made.recv(65536)):
                    break
                got += more
    return (got[4], got[5:]) if got else (0, b"")


async def serves(fabric: Fabric) -> None:
    """A peer connects, writes, and leaves."""
    async with open_fabric("tcp") as peer:
        source, target = Memory(peer, PAGE), Memory(fabric, PAGE)
        there = await peer.connect(fabric.address, timeout_s=DEADLINE_S)
        arrival = fabric.expect(1, 1)
        await peer.write(there, source.region, 0, target.descriptor, 0, PAGE, 1, timeout_s=DEADLINE_S).wait()
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        arrival.close()
        target.region.close()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def mutated(fabric: Fabric) -> st.SearchStrategy[bytes]:
    """Frames that are almost right, and bytes that are not."""
    endpoints = st.binary(max_size=64) | st.just(ENDPOINT) | st.just(ENDPOINT[:15]) | st.just(ENDPOINT + b"\0")
    u64 = st.integers(0, 2**64 - 1)
    lies = st.fixed_dictionaries(
        {},
        optional={
            "protocol": st.integers(0, 65535),
            "provider": st.binary(max_size=20),
            "identity": st.just(0) | u64,
            "target": u64,
            "generation": u64,
            "floor": u64,
            "nics": st.integers(0, 65535) | st.just(64),
            "count": st.integers(0, 65535),
            "rails": st.lists(st.tuples(endpoints, st.binary(max_size=200)), max_size=70),
        },
    )
    whole = lies.map(lambda changed: frame(HELLO, hello(fabric, **changed)))
    cut = st.tuples(whole, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    other = st.tuples(st.integers(0, 255), st.binary(max_size=100)).map(lambda pair: frame(*pair))
    return st.lists(whole | cut | other | st.binary(max_size=300), min_size=1, max_size=6).map(b"".join)


def test_anything_may_come_in(runner: asyncio.Runner) -> None:
    fabric = runner.run(Fabric.open(provider="tcp", host="127.0.0.1", identity=new_identity()))
    with ExitStack() as held:

        @settings(max_examples=150, deadline=None, database=None, suppress_health_check=[*HealthCheck])
        @given(mutated(fabric), st.booleans())
        def throw(noise: bytes, hang_up: bool) -> None:
            made = dial(fabric, noise)
            if hang_up:
                made.close()
            else:
                held.enter_context(made)

        throw()
        runner.run(serves(fabric))
        runner.run(until(lambda: connections(fabric) == 0, HANDSHAKE_S + 2))
        runner.run(serves(fabric))
    runner.run(fabric.close())


def connections(fabric: Fabric) -> int:
    """That are open on the fabric's side, whatever the other did."""
    end = f":{ADDRESS.unpack_from(fabric.address)[4]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(row[1].endswith(end) and row[3] in ("01", "08") for row in rows)  # established, half closed


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - of a native thread, which has no event for it
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("lies", "why"),
    [
        ({"target": 77}, b"another incarnation"),
        ({"provider": b"shm"}, b"provider shm"),
        ({"rails": [(ENDPOINT[:3], b"")]}, b"no address of"),
        ({"rails": [(b"", b"")]}, b"no address of"),
        ({"rails": [(b"\xff\xff" + ENDPOINT[2:], b"")]}, b"no address of"),
        ({"rails": []}, b"0 rails, for 1 NICs there and 1 here"),
        ({"nics": 64}, b"1 rails, for 64 NICs there and 1 here"),
    ],
)
async def test_lies_in_a_hello_are_refused_by_name(lies: dict[str, object], why: bytes) -> None:
    async with open_fabric("tcp") as here:
        kind, said = await asyncio.to_thread(answer, here, hello(here, **lies))
        assert kind == REJECT
        assert why in said
        await serves(here)


@pytest.mark.parametrize("lies", [{"identity": 0}, {"nics": 0}, {"nics": 65}, {"count": 2}, {"count": 65535}])
async def test_what_is_no_hello_ends_the_connection(lies: dict[str, object]) -> None:
    async with open_fabric("tcp") as here:
        assert await asyncio.to_thread(answer, here, hello(here, **lies)) == (0, b"")
        await serves(here)


async def test_hellos_of_nobody_one_in_another() -> None:
    """Each was once read while the one before was: a hundred thousand were deeper than any stack."""
    async with open_fabric("tcp") as here:
        with await asyncio.to_thread(dial, here, frame(HELLO, hello(here, identity=0)) * 100_000):
            await serves(here)


async def test_a_peer_has_so_many_connections_and_no_more() -> None:
    async with open_fabric("tcp") as here:
        said = frame(HELLO, hello(here, identity=9))
        with ExitStack() as held:
            made = [held.enter_context(await asyncio.to_thread(dial, here, said)) for _ in range(12)]
            kinds = [(await asyncio.to_thread(one.recv, 5))[4] for one in made]
            await serves(here)
        assert kinds == [WELCOME] * 8 + [REJECT] * 4


async def test_half_open_connections_keep_nobody_out_and_end() -> None:
    """More than may wait: the oldest go first, all by their deadline, and a peer that says hello is served at once."""
    async with open_fabric("tcp") as here:
        with ExitStack() as held:
            made = [held.enter_context(dial(here, random.Random(i).randbytes(3))) for i in range(300)]
            started = time.monotonic()
            await serves(here)
            assert time.monotonic() - started < HANDSHAKE_S / 2
            for one in made[:40]:
                assert await asyncio.to_thread(one.recv, 1) == b""
            assert time.monotonic() - started < HANDSHAKE_S / 2, "they were closed for lack of room"
            for one in made[40:]:
                assert await asyncio.to_thread(one.recv, 1) == b""
            assert time.monotonic() - started < HANDSHAKE_S + 1


async def test_one_who_says_ping_before_hello_does_not_stay() -> None:
    async with open_fabric("tcp") as here:
        with dial(here, frame(PING, b"")) as made:
            started = time.monotonic()
            assert await asyncio.to_thread(made.recv, 1) == b""
            assert time.monotonic() - started < HANDSHAKE_S / 2


async def test_one_who_talks_without_end_is_heard_with_the_others() -> None:
    async with open_fabric("tcp") as here, open_fabric("tcp") as there:
        lost = LostPeers(there)
        await there.connect(here.address, timeout_s=DEADLINE_S)
        with dial(here, frame(HELLO, hello(here))) as made:
            stop = threading.Event()

            def talk() -> None:
                pings = frame(PING, b"x" * 3) * 100_000
                with suppress(OSError):
                    while not stop.is_set():
                        made.sendall(pings)

            talking = asyncio.create_task(asyncio.to_thread(talk))
            try:
                deadline = time.monotonic() + 1.8
                while time.monotonic() < deadline:
                    await serves(here)
            finally:
                stop.set()
                made.shutdown(socket.SHUT_RDWR)
                await talking
        assert lost.seen == []
