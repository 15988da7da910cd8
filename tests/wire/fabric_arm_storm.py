"""Arms plan after plan while another thread lets them pass: run in a process of its own, because what it is about (a native
thread that wants the interpreter's lock while the interpreter waits for the thread's) stops the whole process."""

from __future__ import annotations

import asyncio
import sys
import threading

from tests.wire.test_fabric_watcher import LAYERS, rig

PLANS = 400


async def main(provider: str) -> None:
    async with rig(provider) as r:
        watcher = r.here.watch(r.counter.fd)
        ended = threading.Event()

        def let_pass() -> None:
            while not ended.is_set():
                r.counter.advance()

        passing = threading.Thread(target=let_pass)
        passing.start()
        try:
            for number in range(PLANS):
                first = number * LAYERS
                transfers = watcher.arm(first, [r.plan(1, [page]) for page in range(8)])
                if number % 16 == 15:
                    await asyncio.gather(*(transfer.wait() for transfer in transfers))
        finally:
            ended.set()
            passing.join()
        watcher.close()
    print("done")


asyncio.run(main(sys.argv[1]))
