"""The fabric by hand whose writes land by themselves: a plan's once the layer counter has passed it, others a moment later; or,
while `hold` is set, when the test says so."""

from __future__ import annotations

import asyncio
import mmap

from tests.fake_fabric import FakeFabric


class LandingFabric(FakeFabric):
    """Writes land as soon as the event loop turns, unless `hold` is set: then when the test says so. Pages of a layer land
    only once the layer counter has passed it."""

    hold = False

    def _track(self, transfer):
        super()._track(transfer)
        if not self.hold:
            self._land_when_computed(transfer)
        return transfer

    def _land_when_computed(self, transfer):
        asyncio.get_running_loop().call_later(0.01, transfer.land)

    def watch(self, counter_fd):
        return CountingWatcher(self, counter_fd)


class CountingWatcher:
    """Lands a plan's layers as the counter in shared memory passes them."""

    def __init__(self, fabric, counter_fd):
        self.fabric = fabric
        self.memory = mmap.mmap(counter_fd, 4096)
        self.tasks = set()
        self.plans = []

    def arm(self, first, writes):
        transfers = []
        for write in writes:
            transfer = FakeFabric.write_pages(self.fabric, write) if self.fabric.hold else self._armed(first, write)
            transfers.append(transfer)
            self.plans.append((first + write.geometry.num_layers, transfer))
        return transfers

    def _armed(self, first, write):
        hold, self.fabric.hold = self.fabric.hold, True
        try:
            transfer = self.fabric.write_pages(write)
        finally:
            self.fabric.hold = hold
        task = asyncio.ensure_future(self._land(first + write.geometry.num_layers, transfer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return transfer

    def _passed(self, counter):
        return int.from_bytes(self.memory[:8], "little") >= counter

    async def _land(self, counter, transfer):
        while not self._passed(counter) and not transfer.future.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        transfer.land()

    def disarm(self):
        for counter, transfer in self.plans:
            if not self._passed(counter):
                transfer.cancel()

    def close(self):
        for task in self.tasks:
            task.cancel()
        self.memory.close()
