"""A layer's pages go when the counter passes the layer, and not before."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.engine.counter import create_counter
from shared.errors import FabricError, PeerLost, RemoteAccessError, TransferCancelled, TransferTimeout
from shared.transfer.fabric import Fabric
from shared.transfer.handles import Connection
from shared.transfer.interface import PagedWrite
from tests.wire.fabric_rig import DEADLINE_S, PROVIDERS, Memory, open_fabric, paged

pytestmark = pytest.mark.parametrize("provider", PROVIDERS)

PAGES, PAGE, LAYERS = 8, 4096, 6
STRIDE = PAGES * PAGE
SYS_FUTEX, FUTEX_WAKE = 202, 1


class Counter:
    """The executor's side of `shared.engine.counter`."""

    def __init__(self) -> None:
        self.fd = create_counter()
        self._map = mmap.mmap(self.fd, 4096)
        self._word = ctypes.c_uint64.from_buffer(self._map)
        self._libc = ctypes.CDLL(None)

    def advance(self, by: int = 1, *, wake: bool = True) -> None:
        self._word.value += by
        if wake:
            address = ctypes.c_void_p(ctypes.addressof(self._word))
            self._libc.syscall(SYS_FUTEX, address, FUTEX_WAKE, 1 << 30, None, None, 0)

    def close(self) -> None:
        del self._word
        self._map.close()
        os.close(self.fd)


class Rig:
    def __init__(self, here: Fabric, there: Fabric, peer: Connection, counter: Counter) -> None:
        self.here, self.there, self.peer, self.counter = here, there, peer, counter
        self.source, self.target = Memory(here, LAYERS * STRIDE), Memory(there, LAYERS * STRIDE)
        self.content = self.source.fill_random()

    def plan(self, immediate: int, pages: list[int], *, timeout_s: float = DEADLINE_S) -> PagedWrite:
        return paged(
            self.peer,
            self.source,
            self.target.descriptor,
            pages,
            page_bytes=PAGE,
            immediate=immediate,
            layers=LAYERS,
            source_stride=STRIDE,
            target_stride=STRIDE,
            timeout_s=timeout_s,
        )

    async def arrived(self, immediate: int, count: int) -> None:
        arrival = self.there.expect(immediate, count)
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        arrival.close()

    def layer_is_there(self, layer: int, pages: range = range(PAGES)) -> bool:
        begin, end = layer * STRIDE + pages[0] * PAGE, layer * STRIDE + (pages[-1] + 1) * PAGE
        return self.target.bytes[begin:end] == self.content[begin:end]


@asynccontextmanager
async def rig(provider: str) -> AsyncIterator[Rig]:
    counter = Counter()
    try:
        async with open_fabric(provider) as here, open_fabric(provider) as there:
            peer = await here.connect(there.address, timeout_s=DEADLINE_S)
            yield Rig(here, there, peer, counter)
    finally:
        counter.close()


async def test_each_layer_goes_when_the_counter_passes_it(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        [transfer] = watcher.arm(0, [r.plan(1, [*range(PAGES)])])
        passed = []
        for layer in range(LAYERS):
            assert r.there.stats().arrived == layer * PAGES
            arrival = r.there.expect(1, PAGES)
            passed.append(time.monotonic_ns())
            r.counter.advance()
            async with asyncio.timeout(DEADLINE_S):
                await arrival.wait()
            arrival.close()
            assert r.layer_is_there(layer)
            assert layer == LAYERS - 1 or not r.layer_is_there(layer + 1)
        report = await transfer.wait()
        assert report.writes == LAYERS * PAGES
        for timing, when in zip(report.layers, passed, strict=True):
            assert when < timing.posted_ns <= timing.completed_ns
        watcher.close()


async def test_plans_are_armed_ahead_and_share_layers(provider: str) -> None:
    """Two chunks armed before either runs; the first has two requests, one of them without pages."""
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        first, none = watcher.arm(0, [r.plan(1, [0, 1, 2]), r.plan(2, [])])
        [second] = watcher.arm(LAYERS, [r.plan(3, [3, 4, 5, 6, 7])])
        async with asyncio.timeout(DEADLINE_S):
            assert (await none.wait()).writes == 0
        for _ in range(LAYERS):
            r.counter.advance()
        assert (await first.wait()).writes == 3 * LAYERS
        await r.arrived(1, 3 * LAYERS)
        assert all(r.layer_is_there(layer, range(3)) for layer in range(LAYERS))
        assert r.there.stats().arrived == 3 * LAYERS
        r.counter.advance(LAYERS)
        assert (await second.wait()).writes == 5 * LAYERS
        await r.arrived(3, 5 * LAYERS)
        assert r.target.bytes[:] == r.content
        watcher.close()


async def test_a_counter_that_is_ahead_lets_go_at_once(provider: str) -> None:
    async with rig(provider) as r:
        r.counter.advance((1 << 32) - 3)  # The plan crosses the low half of the counter.
        watcher = r.here.watch(r.counter.fd)
        [transfer] = watcher.arm((1 << 32) - 5, [r.plan(1, [*range(PAGES)])])
        await r.arrived(1, 2 * PAGES)
        assert r.there.stats().arrived == 2 * PAGES
        r.counter.advance(100)
        assert (await transfer.wait()).writes == LAYERS * PAGES
        watcher.close()


async def test_a_counter_that_nobody_wakes_is_polled(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd, poll_s=0.001)
        [transfer] = watcher.arm(0, [r.plan(1, [*range(PAGES)])])
        for layer in range(LAYERS):
            arrival = r.there.expect(1, PAGES)
            r.counter.advance(wake=False)
            async with asyncio.timeout(DEADLINE_S):
                await arrival.wait()
            arrival.close()
            assert r.layer_is_there(layer)
        await transfer.wait()
        watcher.close()


async def test_disarm_drops_what_has_not_gone(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        first, second = [watcher.arm(first, [r.plan(1, [*range(PAGES)])])[0] for first in (0, LAYERS)]
        r.counter.advance(2)
        await r.arrived(1, 2 * PAGES)
        watcher.disarm()
        for transfer in (first, second):
            with pytest.raises(TransferCancelled):
                async with asyncio.timeout(DEADLINE_S):
                    await transfer.wait()
        r.counter.advance(LAYERS)
        # Armed anew it works; what was dropped stays dropped.
        [third] = watcher.arm(2, [r.plan(2, [*range(PAGES)])])
        assert (await third.wait()).writes == LAYERS * PAGES
        await r.arrived(2, LAYERS * PAGES)
        assert r.there.stats().arrived == (2 + LAYERS) * PAGES
        watcher.close()


async def test_one_transfer_of_a_plan_is_cancelled(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        kept, dropped = watcher.arm(0, [r.plan(1, [0, 1]), r.plan(2, [2, 3])])
        r.counter.advance()
        await r.arrived(2, 2)
        dropped.cancel()
        with pytest.raises(TransferCancelled):
            await dropped.wait()
        r.counter.advance(LAYERS - 1)
        assert (await kept.wait()).writes == 2 * LAYERS
        await r.arrived(1, 2 * LAYERS)
        assert r.there.stats().arrived == 2 * LAYERS + 2
        watcher.close()


async def test_a_plan_that_never_runs_ends_by_its_deadline(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        [transfer] = watcher.arm(0, [r.plan(1, [0], timeout_s=0.1)])
        with pytest.raises(TransferTimeout):
            async with asyncio.timeout(1.0):
                await transfer.wait()
        watcher.close()


async def test_a_lost_peer_ends_its_part_of_a_plan_only(provider: str) -> None:
    async with rig(provider) as r, open_fabric(provider) as other:
        theirs = Memory(other, LAYERS * STRIDE)
        peer = await r.here.connect(other.address, timeout_s=DEADLINE_S)
        watcher = r.here.watch(r.counter.fd)
        plan = paged(
            peer,
            r.source,
            theirs.descriptor,
            [0],
            page_bytes=PAGE,
            immediate=1,
            layers=LAYERS,
            source_stride=STRIDE,
            target_stride=STRIDE,
        )
        kept, lost = watcher.arm(0, [r.plan(1, [0]), plan])
        r.counter.advance()
        await r.arrived(1, 1)
        await other.close()
        with pytest.raises(PeerLost):
            async with asyncio.timeout(DEADLINE_S):
                await lost.wait()
        r.counter.advance(LAYERS - 1)
        assert (await kept.wait()).writes == LAYERS
        watcher.close()


async def test_a_bad_plan_arms_nothing(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        with pytest.raises(RemoteAccessError):
            watcher.arm(0, [r.plan(1, [0]), r.plan(2, [PAGES])])
        r.counter.advance(LAYERS)
        [transfer] = watcher.arm(0, [r.plan(3, [0])])
        await transfer.wait()
        assert r.here.stats().posted == LAYERS
        watcher.close()


async def test_closing_ends_plans_and_is_final(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        [transfer] = watcher.arm(0, [r.plan(1, [0])])
        watcher.close()
        watcher.close()
        with pytest.raises(TransferCancelled):
            async with asyncio.timeout(DEADLINE_S):
                await transfer.wait()
        with pytest.raises(FabricError, match="closed"):
            watcher.arm(0, [r.plan(1, [0])])
        left_open = r.here.watch(r.counter.fd)
        left_open.arm(0, [r.plan(1, [0])])
        await r.here.close()
        left_open.close()
        left_open.disarm()


def test_plans_end_while_others_are_armed(provider: str) -> None:
    """No native thread waits for the interpreter's lock while it holds one that the interpreter waits for."""
    command = [sys.executable, "-m", "tests.wire.fabric_arm_storm", provider]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
