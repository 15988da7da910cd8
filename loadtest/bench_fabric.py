"""How fast pages move: each provider beside one thread's memcpy and plain framed TCP, in the same run.

    python -m loadtest.bench_fabric [--seconds 0.5] [--rounds 5] [--sizes 4096 65536]

Every page goes as one write with one immediate, as the mesh sends it; the peer is another process. Framed TCP is what one
would write by hand: a 16-byte header and the page in one `writev`, read into place by a thread of the peer, no Python in
the loop. It, memcpy and the providers are measured in turn, round after round, and the median of the rounds counts.
A second table is what the order inside a page costs where the two sides' tensor parallelism differs
(`loadtest.bench_fabric_layouts`). Prints both with ratios and writes report/bench_fabric.json. Exits 1 where a target is missed:
tcp at 64 KiB at least 1.0 x framed TCP, shm at 64 KiB at least 0.4 x memcpy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from loadtest import bench_fabric_layouts
from loadtest.native_baseline import Baseline
from shared.transfer.fabric import Fabric, library_version, providers
from shared.transfer.handles import Writes
from shared.transfer.interface import PagedWrite, PageGeometry

KIB = 1024
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB]
ARENA = 256 << 20
REPORT = Path("report/bench_fabric.json")
TARGETS = [("tcp", "framed tcp", 64 * KIB, 1.0), ("shm", "memcpy", 64 * KIB, 0.4)]

# Moves at least `seconds` of pages of a size; returns bytes a second.
Runner = Callable[[int, float], Awaitable[float]]


def arena() -> tuple[int, mmap.mmap]:
    """A memfd of ARENA bytes with every page present, and its mapping."""
    fd = os.memfd_create("kvmesh-bench")
    os.ftruncate(fd, ARENA)
    memory = mmap.mmap(fd, ARENA)
    memory[:] = bytes(ARENA)
    return fd, memory


async def read_line(process: asyncio.subprocess.Process) -> dict[str, str]:
    assert process.stdout is not None
    line: dict[str, str] = json.loads(await process.stdout.readline())
    return line


@asynccontextmanager
async def peer(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.bench_fabric", *arguments, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def provider_runner(provider: str) -> AsyncIterator[Runner]:
    async with peer("--serve", provider) as process:
        there = await read_line(process)
        async with await Fabric.open(provider=provider, host="127.0.0.1", identity=1) as fabric:
            fd, _ = arena()
            region = fabric.register(fd, ARENA)
            connection = await fabric.connect(bytes.fromhex(there["address"]), timeout_s=10)

            async def run(page_bytes: int, seconds: float) -> float:
                pages = list(range(ARENA // page_bytes))
                geometry = PageGeometry(
                    run_bytes=page_bytes,
                    source_offset=0,
                    target_offset=0,
                    source_page_stride=page_bytes,
                    target_page_stride=page_bytes,
                    source_layer_stride=0,
                    target_layer_stride=0,
                    num_layers=1,
                )
                # Batches of about 32 MiB, two of them always under way.
                batch = min(len(pages), max(64, (128 << 20) // page_bytes))
                started, moved = time.perf_counter(), 0
                under_way: list[Writes] = []
                while time.perf_counter() - started < seconds or under_way:
                    while len(under_way) < 2 and time.perf_counter() - started < seconds:
                        first = moved // page_bytes % (len(pages) - batch + 1)
                        part = pages[first : first + batch]
                        under_way.append(
                            fabric.write_pages(
                                PagedWrite(
                                    peer=connection,
                                    source=region,
                                    source_pages=part,
                                    target=bytes.fromhex(there["descriptor"]),
                                    target_pages=part,
                                    geometry=geometry,
                                    immediate=1,
                                    timeout_s=60,
                                )
                            )
                        )
                        moved += batch * page_bytes
                    await under_way.pop(0).wait()
                return moved / (time.perf_counter() - started)

            yield run


@asynccontextmanager
async def serving(provider: str) -> AsyncIterator[tuple[bytes, bytes, int]]:
    """A peer with an arena: its address, the arena's descriptor and length."""
    async with peer("--serve", provider) as process:
        there = await read_line(process)
        yield bytes.fromhex(there["address"]), bytes.fromhex(there["descriptor"]), ARENA


async def serve(provider: str) -> None:
    async with await Fabric.open(provider=provider, host="127.0.0.1", identity=2) as fabric:
        fd, _ = arena()
        region = fabric.register(fd, ARENA)
        print(json.dumps({"address": fabric.address.hex(), "descriptor": region.descriptor.hex()}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@asynccontextmanager
async def framed_tcp_runner(baseline: Baseline) -> AsyncIterator[Runner]:
    async with peer("--serve", "framed tcp") as process:
        port = int((await read_line(process))["port"])
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, memory = arena()

            async def run(page_bytes: int, seconds: float) -> float:
                return await asyncio.to_thread(baseline.send, stream.fileno(), memory, page_bytes, seconds)

            yield run


def serve_framed_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"port": str(listener.getsockname()[1])}), flush=True)
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with stream:
            _, memory = arena()
            Baseline.build().receive(stream.fileno(), memory)


class Row(msgspec.Struct):
    """One transport at one page size: bytes a second, the median and all rounds."""

    transport: str
    page_bytes: int
    bytes_per_s: float
    rounds: list[float]
    of_memcpy: float = 0.0
    of_framed_tcp: float = 0.0


async def measure(sizes: list[int], rounds: int, seconds: float) -> list[Row]:
    baseline = Baseline.build()
    _, source = arena()
    _, target = arena()

    async def memcpy(page_bytes: int, seconds: float) -> float:
        return await asyncio.to_thread(baseline.copy, source, target, page_bytes, seconds)

    async with AsyncExitStack() as stack:
        runners: dict[str, Runner] = {"memcpy": memcpy}
        runners["framed tcp"] = await stack.enter_async_context(framed_tcp_runner(baseline))
        for provider in ("tcp", "shm"):
            if provider in providers():
                runners[provider] = await stack.enter_async_context(provider_runner(provider))
        samples: dict[tuple[str, int], list[float]] = {}
        for turn in range(rounds + 1):
            for size in sizes:
                for name, run in runners.items():
                    rate = await run(size, seconds)
                    if turn > 0:  # The first touches memory and opens connections.
                        samples.setdefault((name, size), []).append(rate)
    rows = [Row(name, size, statistics.median(rates), rates) for (name, size), rates in samples.items()]
    medians = {(row.transport, row.page_bytes): row.bytes_per_s for row in rows}
    for row in rows:
        row.of_memcpy = row.bytes_per_s / medians["memcpy", row.page_bytes]
        row.of_framed_tcp = row.bytes_per_s / medians["framed tcp", row.page_bytes]
    return rows


def print_table(rows: list[Row]) -> None:
    sizes = sorted({row.page_bytes for row in rows})
    print(f"GB/s (x memcpy, x framed tcp), libfabric {library_version()}")
    print(f"{'':>12}" + "".join(f"{size // KIB:>19} KiB" for size in sizes))
    for name in dict.fromkeys(row.transport for row in rows):
        cells = [row for size in sizes for row in rows if (row.transport, row.page_bytes) == (name, size)]
        texts = (f"{row.bytes_per_s / 1e9:.2f} ({row.of_memcpy:.2f}, {row.of_framed_tcp:.2f})" for row in cells)
        print(f"{name:>12}" + "".join(f"{text:>23}" for text in texts))


def verdicts(rows: list[Row]) -> list[dict[str, object]]:
    by = {(row.transport, row.page_bytes): row.bytes_per_s for row in rows}
    found: list[dict[str, object]] = []
    for name, base, size, least in TARGETS:
        if (name, size) in by:
            ratio = by[name, size] / by[base, size]
            target = f"{name} at {size // KIB} KiB >= {least} x {base}"
            found.append({"target": target, "ratio": round(ratio, 3), "met": ratio >= least})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="page sizes, bytes")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "framed tcp":
        serve_framed_tcp()
        return 0
    if options.serve:
        asyncio.run(serve(options.serve))
        return 0
    rows = asyncio.run(measure(options.sizes, options.rounds, options.seconds))
    print_table(rows)
    layouts = asyncio.run(bench_fabric_layouts.measure(serving, options.rounds, options.seconds))
    bench_fabric_layouts.print_table(layouts)
    targets = verdicts(rows)
    for verdict in targets:
        print(f"{verdict['target']}: {verdict['ratio']} {'met' if verdict['met'] else 'MISSED'}")
    REPORT.parent.mkdir(exist_ok=True)
    report = {
        "libfabric": library_version(),
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "kernel": platform.release()},
        "rows": msgspec.to_builtins(rows),
        "layouts": msgspec.to_builtins(layouts),
        "targets": targets,
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(verdict["met"] for verdict in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
