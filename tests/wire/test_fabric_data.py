"""What is written arrives, and is counted, exactly."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from shared.errors import FabricError, RemoteAccessError
from shared.transfer.handles import Connection
from shared.transfer.interface import PagedWrite, PageGeometry
from tests.wire.fabric_rig import DEADLINE_S, PROVIDERS, Memory, open_fabric, other_process, paged

pytestmark = pytest.mark.parametrize("provider", PROVIDERS)


async def test_a_hundred_thousand_writes_arrive_and_are_counted(provider: str) -> None:
    pages, layers, page_bytes = 25_000, 4, 64
    length = pages * layers * page_bytes
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, length), Memory(there, length)
        content = source.fill_random()
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        arrival = there.expect(7, pages * layers)
        order = random.Random(1).sample(range(pages), pages)
        stride = pages * page_bytes
        plan = paged(
            peer,
            source,
            target.descriptor,
            order,
            page_bytes=page_bytes,
            immediate=7,
            layers=layers,
            source_stride=stride,
            target_stride=stride,
        )
        report = await here.write_pages(plan).wait()
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert (report.writes, report.bytes) == (pages * layers, length)
        assert len(report.layers) == layers
        assert all(0 < layer.posted_ns <= layer.completed_ns for layer in report.layers)
        assert target.bytes[:] == content
        assert there.stats().arrived == pages * layers
        assert here.stats().posted == here.stats().completed == pages * layers


async def test_pages_land_where_the_geometry_says(provider: str) -> None:
    """Layer strides and page numbers differ between the sides; everything around the pages stays as it was."""
    page_bytes, layers = 4096 + 8, 3
    source_stride, target_stride = 5 * page_bytes, 9 * page_bytes
    pairs = [(4, 0), (0, 8), (2, 3), (1, 7)]
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source = Memory(here, layers * source_stride)
        target = Memory(there, layers * target_stride)
        content = source.fill_random()
        expected = bytearray(target.fill_random())
        for layer in range(layers):
            for s, t in pairs:
                begin, into = layer * source_stride + s * page_bytes, layer * target_stride + t * page_bytes
                expected[into : into + page_bytes] = content[begin : begin + page_bytes]
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        arrival = there.expect(1, layers * len(pairs))
        plan = paged(
            peer,
            source,
            target.descriptor,
            [s for s, _ in pairs],
            target_pages=[t for _, t in pairs],
            page_bytes=page_bytes,
            immediate=1,
            layers=layers,
            source_stride=source_stride,
            target_stride=target_stride,
        )
        await here.write_pages(plan).wait()
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert target.bytes[:] == bytes(expected)


HALVES = PageGeometry(
    run_bytes=40,
    source_offset=24,
    target_offset=72,
    source_page_stride=64,
    target_page_stride=128,
    source_layer_stride=3 * 64,
    target_layer_stride=5 * 128,
    num_layers=2,
)
"""40 bytes from the 24th of a page of 64 to the 72nd of one of 128."""


def run_of(
    peer: Connection, source: Memory, target: Memory, pairs: list[tuple[int, int]], **changes: int
) -> PagedWrite:
    return PagedWrite(
        peer=peer,
        source=source.region,
        source_pages=[page for page, _ in pairs],
        target=target.descriptor,
        target_pages=[page for _, page in pairs],
        geometry=msgspec.structs.replace(HALVES, **changes),
        immediate=1,
        timeout_s=DEADLINE_S,
    )


async def test_a_run_of_a_page_lands_in_a_page_of_another_size(provider: str) -> None:
    pairs = [(2, 0), (0, 4), (1, 1)]
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        content, expected = source.fill_random(), bytearray(target.fill_random())
        for layer in range(HALVES.num_layers):
            for s, t in pairs:
                begin, into = layer * 3 * 64 + s * 64 + 24, layer * 5 * 128 + t * 128 + 72
                expected[into : into + 40] = content[begin : begin + 40]
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        arrival = there.expect(1, 2 * len(pairs))
        report = await here.write_pages(run_of(peer, source, target, pairs)).wait()
        assert (report.writes, report.bytes) == (6, 240)
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert target.bytes[:] == bytes(expected)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source_offset": 25}, "run ends past its source page of 64 bytes"),
        ({"target_offset": 89}, "run ends past its target page of 128 bytes"),
        ({"run_bytes": 41}, "run ends past its source page of 64 bytes"),
        ({"source_offset": 2**64 - 1}, "write ends past its source region"),
        ({"target_offset": 2**64 - 1}, "write ends past its target region"),
        ({"source_page_stride": 2**64 - 1}, "write ends past its source region"),
        ({"target_page_stride": 4096}, "write ends past its target region"),
        ({"target_layer_stride": 4096}, "write ends past its target region"),
    ],
)
async def test_a_run_outside_of_its_page_or_region_is_refused(
    provider: str, changes: dict[str, int], says: str
) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        with pytest.raises(RemoteAccessError, match=says):
            here.write_pages(run_of(peer, source, target, [(1, 1)], **changes))
        assert here.stats().posted == 0


@pytest.mark.parametrize("length", [1, 63, 64, 4095, 4096, 4097, 65537, 3_000_001])
async def test_a_single_write_of_any_length(provider: str, length: int) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, length + 17), Memory(there, length + 29)
        content = source.fill_random()
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        arrival = there.expect(0xFFFFFFFF, 1)
        transfer = here.write(peer, source.region, 17, target.descriptor, 29, length, 0xFFFFFFFF, timeout_s=DEADLINE_S)
        assert (await transfer.wait()).bytes == length
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()
        assert target.bytes[:] == bytes(29) + content[17:]


async def test_a_write_of_no_bytes_is_its_immediate(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        arrival = there.expect(3, 2)
        for offset in (0, 4096):
            transfer = here.write(peer, source.region, 0, target.descriptor, offset, 0, 3, timeout_s=DEADLINE_S)
            report = await transfer.wait()
            assert (report.writes, report.bytes, len(report.layers)) == (1, 0, 1)
        async with asyncio.timeout(DEADLINE_S):
            await arrival.wait()


@pytest.mark.parametrize(("pages", "layers"), [([], 1), ([], 0), ([1], 0)])
async def test_nothing_to_write_completes_at_once(provider: str, pages: list[int], layers: int) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        plan = paged(peer, source, target.descriptor, pages, page_bytes=64, immediate=1, layers=layers)
        async with asyncio.timeout(DEADLINE_S):
            report = await here.write_pages(plan).wait()
            await there.expect(1, 0).wait()
        assert (report.writes, report.bytes, report.layers) == (0, 0, [])


async def test_immediates_before_their_counter_are_counted(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        plan = paged(peer, source, target.descriptor, [*range(10)], page_bytes=64, immediate=5)
        await here.write_pages(plan).wait()
        early = there.expect(5, 30)
        await here.write_pages(plan).wait()
        assert not early.done
        await here.write_pages(plan).wait()
        async with asyncio.timeout(DEADLINE_S):
            await early.wait()


async def test_immediates_after_their_counter_was_closed_count_for_nobody(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)

        async def write(immediate: int) -> None:
            plan = paged(peer, source, target.descriptor, [*range(10)], page_bytes=64, immediate=immediate)
            await here.write_pages(plan).wait()

        async def counted(marker: int) -> None:
            """Until whatever was written before has been counted."""
            arrival = there.expect(marker, 10)
            await write(marker)
            async with asyncio.timeout(DEADLINE_S):
                await arrival.wait()

        first = there.expect(5, 100)
        await write(5)
        await counted(6)
        first.close()
        first.close()
        with pytest.raises(FabricError, match="disarmed"):
            await first.wait()
        await write(5)
        await counted(7)
        assert there.stats().late == 10
        again = there.expect(5, 10)
        await write(5)
        async with asyncio.timeout(DEADLINE_S):
            await again.wait()


async def test_an_immediate_that_is_used_again_starts_from_nothing(provider: str) -> None:
    """The last writes of a use complete at the initiator a moment before they are counted at the target."""
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 4096), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)
        plan = paged(peer, source, target.descriptor, [*range(10)], page_bytes=64, immediate=5)
        for _ in range(300):
            there.expect(5, 1000).close()
            await here.write_pages(plan).wait()
            arrival = there.expect(5, 10)
            await here.write_pages(plan).wait()
            async with asyncio.timeout(DEADLINE_S):
                await arrival.wait()
            arrival.close()
        await here.write_pages(plan).wait()
        there.expect(5, 0)
        assert there.stats().late == 300 * 10 + 10


async def test_an_immediate_is_armed_once_at_a_time(provider: str) -> None:
    async with open_fabric(provider) as fabric:
        arrival = fabric.expect(9, 1)
        with pytest.raises(FabricError, match="armed already"):
            fabric.expect(9, 1)
        arrival.close()
        fabric.expect(9, 1).close()


async def test_more_posts_than_the_provider_takes(provider: str) -> None:
    """A window far beyond any queue of the provider: posts come back EAGAIN, are retried, and all arrive."""
    pages, page_bytes = 50_000, 256
    async with (
        open_fabric(provider, window=32_768) as here,
        other_process(provider, length=pages * page_bytes) as there,
    ):
        source = Memory(here, pages * page_bytes)
        source.fill_random()
        about = await there.call("about")
        peer = await here.connect(bytes.fromhex(about["address"]), timeout_s=DEADLINE_S)
        arrived = there.start("expect", immediate=1, count=pages)
        plan = paged(
            peer, source, bytes.fromhex(about["descriptor"]), [*range(pages)], page_bytes=page_bytes, immediate=1
        )
        assert (await here.write_pages(plan).wait()).writes == pages
        async with asyncio.timeout(DEADLINE_S):
            await arrived
        assert here.stats().retries > 0


async def test_two_fabrics_of_one_process_write_to_each_other_at_once(provider: str) -> None:
    pages, page_bytes = 2_000, 4096
    async with open_fabric(provider) as a, open_fabric(provider) as b:
        from_a, from_b = Memory(a, pages * page_bytes), Memory(b, pages * page_bytes)
        into_a, into_b = Memory(a, pages * page_bytes), Memory(b, pages * page_bytes)
        of_a, of_b = from_a.fill_random(), from_b.fill_random()
        to_b, to_a = await asyncio.gather(
            a.connect(b.address, timeout_s=DEADLINE_S), b.connect(a.address, timeout_s=DEADLINE_S)
        )
        at_a, at_b = a.expect(1, pages), b.expect(1, pages)
        every = [*range(pages)]
        transfers = [
            a.write_pages(paged(to_b, from_a, into_b.descriptor, every, page_bytes=page_bytes, immediate=1)),
            b.write_pages(paged(to_a, from_b, into_a.descriptor, every, page_bytes=page_bytes, immediate=1)),
        ]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(transfer.wait() for transfer in transfers), at_a.wait(), at_b.wait())
        assert into_b.bytes[:] == of_a
        assert into_a.bytes[:] == of_b


async def test_writes_outside_of_a_region_are_refused_before_they_start(provider: str) -> None:
    async with open_fabric(provider) as here, open_fabric(provider) as there:
        source, target = Memory(here, 8192), Memory(there, 4096)
        peer = await here.connect(there.address, timeout_s=DEADLINE_S)

        def write(source_offset: int, target_offset: int, length: int) -> None:
            here.write(
                peer, source.region, source_offset, target.descriptor, target_offset, length, 1, timeout_s=DEADLINE_S
            )

        for source_offset, target_offset, length in [(0, 1, 4096), (0, 4097, 0), (8000, 0, 200), (0, 2**64 - 1, 2)]:
            with pytest.raises(RemoteAccessError, match="ends past its"):
                write(source_offset, target_offset, length)
        for pages, target_pages in [([0], [64]), ([128], [0]), ([0], [2**32 - 1])]:
            with pytest.raises(RemoteAccessError, match="ends past its"):
                here.write_pages(
                    paged(
                        peer,
                        source,
                        target.descriptor,
                        pages,
                        target_pages=target_pages,
                        page_bytes=64,
                        immediate=1,
                    )
                )
        with pytest.raises(RemoteAccessError, match="differ in length"):
            here.write_pages(
                paged(peer, source, target.descriptor, [0], target_pages=[0, 1], page_bytes=64, immediate=1)
            )
        assert here.stats().posted == 0
