"""HND against NHD inside a page, where the two sides' tensor parallelism differs: part of `loadtest.bench_fabric`.

A page of 64 tokens, 8 KV heads of 128, bf16: what one source rank sends to one target rank, over and over, the orders in turn.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from shared.kv.nhd import nhd_runs
from shared.kv.shards import ShardRun, runs, shard_layout
from shared.layout import KvLayout
from shared.transfer.fabric import Fabric
from shared.transfer.handles import Connection, Region
from shared.transfer.interface import PagedWrite, PageGeometry

PAGE = KvLayout(num_layers=1, num_kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16")
CASES = [(4, 2), (2, 4)]
ORDERS = {"HND": runs, "NHD": nhd_runs}
BATCH_PAGES = 64

# A peer for a provider: its address, its arena's descriptor and length.
Serving = Callable[[str], AbstractAsyncContextManager[tuple[bytes, bytes, int]]]


class LayoutRow(msgspec.Struct):
    """One order for one pair of shardings: bytes a second, the median and all rounds."""

    source_tp: int
    target_tp: int
    order: str
    writes_per_page: int
    bytes_per_write: int
    bytes_per_s: float
    rounds: list[float]


def pair_runs(source_tp: int, target_tp: int, order: str) -> list[ShardRun]:
    """What the first source rank sends to the first target rank."""
    found = ORDERS[order](PAGE, source_tp, target_tp, "bench")
    return [run for run in found if (run.source_rank, run.target_rank) == (0, 0)]


def geometry(run: ShardRun, source: KvLayout, target: KvLayout) -> PageGeometry:
    return PageGeometry(
        run_bytes=run.length,
        source_offset=run.source_offset,
        target_offset=run.target_offset,
        source_page_stride=source.page_bytes,
        target_page_stride=target.page_bytes,
        source_layer_stride=0,
        target_layer_stride=0,
        num_layers=1,
    )


async def send(
    fabric: Fabric, peer: Connection, region: Region, target: bytes, case: tuple[int, int], order: str, seconds: float
) -> float:
    """Bytes a second."""
    source, into = shard_layout(PAGE, case[0]), shard_layout(PAGE, case[1])
    part = pair_runs(*case, order)
    pages = list(range(BATCH_PAGES))
    writes = [
        PagedWrite(
            peer=peer,
            source=region,
            source_pages=pages,
            target=target,
            target_pages=pages,
            geometry=geometry(run, source, into),
            immediate=1,
            timeout_s=60,
        )
        for run in part
    ]
    started, moved = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for transfer in [fabric.write_pages(write) for write in writes]:
            await transfer.wait()
        moved += BATCH_PAGES * sum(run.length for run in part)
    return moved / (time.perf_counter() - started)


async def measure(serving: Serving, rounds: int, seconds: float) -> list[LayoutRow]:
    samples: dict[tuple[tuple[int, int], str], list[float]] = {}
    async with (
        serving("tcp") as (address, descriptor, length),
        await Fabric.open(provider="tcp", host="127.0.0.1", identity=1) as fabric,
    ):
        fd = os.memfd_create("kvmesh-bench")
        os.ftruncate(fd, length)
        region = fabric.register(fd, length)
        os.close(fd)
        peer = await fabric.connect(address, timeout_s=10)
        for turn in range(rounds + 1):
            for case in CASES:
                for order in ORDERS:
                    rate = await send(fabric, peer, region, descriptor, case, order, seconds)
                    if turn > 0:  # The first touches memory.
                        samples.setdefault((case, order), []).append(rate)
    rows: list[LayoutRow] = []
    for (case, order), rates in samples.items():
        part = pair_runs(*case, order)
        rows.append(LayoutRow(*case, order, len(part), part[0].length, statistics.median(rates), rates))
    return rows


def print_table(rows: list[LayoutRow]) -> None:
    print("tcp, pages of 64 tokens, 8 KV heads of 128, bf16: one source rank to one target rank")
    print(f"{'':>14}{'order':>7}{'writes/page':>13}{'bytes/write':>13}{'GB/s':>8}{'of HND':>8}")
    hnd = {(row.source_tp, row.target_tp): row.bytes_per_s for row in rows if row.order == "HND"}
    for row in rows:
        pair = f"TP {row.source_tp} -> TP {row.target_tp}"
        ratio = row.bytes_per_s / hnd[row.source_tp, row.target_tp]
        cells = f"{row.writes_per_page:>13}{row.bytes_per_write:>13}{row.bytes_per_s / 1e9:>8.2f}{ratio:>8.2f}"
        print(f"{pair:>14}{row.order:>7}{cells}")
