"""The configured provider, measured from this process to itself: what libfabric and this machine's memory do, not the network."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from time import perf_counter

import msgspec

from services.doctor.findings import Finding
from services.doctor.mesh import quantile
from shared.kv.region import KvRegion
from shared.transfer.fabric import Fabric
from shared.transfer.handles import Region
from shared.transfer.interface import PagedWrite, PageGeometry, Peer

PAGE_BYTES = 64 << 10
PAGES = 256
"""In each of two regions; also of one batch."""

SECONDS = 0.5
LATENCIES = 100
SMALL_BYTES = 16
WRITE_TIMEOUT_S = 5.0


class Loopback(msgspec.Struct, frozen=True, kw_only=True):
    """`latency_s`: of each small write, from the call to the word in Python that it has arrived."""

    bytes: int
    seconds: float
    latency_s: list[float]


def identity() -> int:
    return secrets.randbits(63) + 1


async def measure(provider: str, host: str, seconds: float = SECONDS) -> Loopback:
    """Raises `FabricError`: the provider cannot be opened here, or a write failed."""
    async with AsyncExitStack() as stack:
        source, target = [
            await stack.enter_async_context(await Fabric.open(provider=provider, host=host, identity=identity()))
            for _ in range(2)
        ]
        regions = []
        for fabric in (source, target):
            memory = KvRegion(PAGE_BYTES * PAGES)
            stack.callback(memory.close)
            with memory.map() as mapped:
                mapped[:] = bytes(memory.nbytes)
            regions.append(fabric.register(memory.fd, memory.nbytes))
            stack.callback(regions[-1].close)
        peer = await source.connect(target.address, timeout_s=WRITE_TIMEOUT_S)
        arrival = target.expect(1, 1 << 40)
        stack.callback(arrival.close)
        latency = [await _one(source, peer, regions) for _ in range(LATENCIES)]
        begin, moved = perf_counter(), 0
        while perf_counter() - begin < seconds:
            moved += await _batch(source, peer, regions)
        return Loopback(bytes=moved, seconds=perf_counter() - begin, latency_s=latency)


async def _one(source: Fabric, peer: Peer, regions: list[Region]) -> float:
    begin = perf_counter()
    write = source.write(peer, regions[0], 0, regions[1].descriptor, 0, SMALL_BYTES, 1, timeout_s=WRITE_TIMEOUT_S)
    await write.wait()
    return perf_counter() - begin


async def _batch(source: Fabric, peer: Peer, regions: list[Region]) -> int:
    """All pages, two batches at once so that the next is there when one ends. Gives their bytes."""
    write = PagedWrite(
        peer=peer,
        source=regions[0],
        source_pages=range(PAGES),
        target=regions[1].descriptor,
        target_pages=range(PAGES),
        geometry=PageGeometry(
            run_bytes=PAGE_BYTES,
            source_offset=0,
            target_offset=0,
            source_page_stride=PAGE_BYTES,
            target_page_stride=PAGE_BYTES,
            source_layer_stride=0,
            target_layer_stride=0,
            num_layers=1,
        ),
        immediate=1,
        timeout_s=WRITE_TIMEOUT_S,
    )
    reports = await asyncio.gather(*(source.write_pages(write).wait() for _ in range(2)))
    return sum(report.bytes for report in reports)


def judge_loopback(found: Loopback, provider: str) -> Finding:
    rate, p50 = found.bytes / found.seconds, quantile(found.latency_s, 0.5)
    numbers = {
        "bytes_per_s": rate,
        "page_bytes": PAGE_BYTES,
        "latency_p50_s": p50,
        "latency_p99_s": quantile(found.latency_s, 0.99),
    }
    text = (
        f"{provider}, this process to itself: {rate / 1e6:.0f} MB/s in pages of {PAGE_BYTES >> 10} KiB, "
        f"{p50 * 1e6:.0f} us p50 for {SMALL_BYTES} bytes until Python hears of it; no link between machines is in it"
    )
    return Finding("ok", "loopback", text, numbers)
