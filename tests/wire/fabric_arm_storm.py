"""Arms plan after plan while the watcher lets the ones before pass. Run in a process of its own: a native thread that wants the
interpreter's lock while the interpreter waits for the thread's stops the whole process. Writes without pages end at once, so
that the plan is the last to hold them."""

from __future__ import annotations

import asyncio
import sys

from tests.wire.test_fabric_watcher import LAYERS, rig

PLANS = 4000


async def main(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        for number in range(PLANS):
            transfers = watcher.arm(number * LAYERS, [r.plan(1, []) for _ in range(20)])
            r.counter.advance(LAYERS)
            if number % 50 == 0:
                await asyncio.gather(*(transfer.wait() for transfer in transfers))
        watcher.close()
    print("done")


asyncio.run(main(sys.argv[1]))
