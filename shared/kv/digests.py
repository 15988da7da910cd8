"""Digests of KV pages: what the prefiller wrote, against what is in the decoder's pages (`KVMESH_VERIFY=pages`).

A digest is the CRC-32 of what is written of one page of one layer, over all ranks: all runs of `shared.kv.shards.runs`, one after
another. The source takes it where the runs come from, the target where they go to, so that it is the same for every two
shardings that fit. It finds accidents, not malice.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import zlib
from collections.abc import Sequence

import msgspec

from shared.kv.shards import ShardRun
from shared.layout import KvLayout

DIGEST_BYTES = 4


class Piece(msgspec.Struct, frozen=True):
    """In every page of every layer of a rank's group of layers: `length` bytes at `offset`."""

    rank: int
    offset: int
    length: int
    group: int = 0


def at_source(runs: Sequence[ShardRun]) -> list[Piece]:
    return [Piece(run.source_rank, run.source_offset, run.length, run.group) for run in runs]


def at_target(runs: Sequence[ShardRun]) -> list[Piece]:
    return [Piece(run.target_rank, run.target_offset, run.length, run.group) for run in runs]


def digests_bytes(layout: KvLayout, pages: int) -> int:
    """Bytes of the digests of that many pages."""
    return pages * layout.all_layers * DIGEST_BYTES


def first_difference(layout: KvLayout, ours: bytes, theirs: bytes) -> tuple[int, int] | None:
    """(position of the page, layer) of the first digest that differs; None where all are equal."""
    for at in range(0, max(len(ours), len(theirs)), DIGEST_BYTES):
        if ours[at : at + DIGEST_BYTES] != theirs[at : at + DIGEST_BYTES]:
            return divmod(at // DIGEST_BYTES, layout.all_layers)
    return None


class PageDigests:
    """Reads the KV of one pool: the pool's regions, one a tensor parallel rank, each of `num_pages` pages of `layout`."""

    def __init__(self, regions: Sequence[memoryview], layout: KvLayout, num_pages: int) -> None:
        """`layout`: of one rank's region."""
        self._layout = layout
        self._num_pages = num_pages
        self._regions = regions

    @classmethod
    def mapped(cls, fds: Sequence[int], layout: KvLayout, num_pages: int) -> PageDigests:
        """Of regions in memfds, through mappings of its own, which go with it; the descriptors stay the caller's. Raises
        `OSError` where one cannot be mapped."""
        size = layout.region_bytes(num_pages)
        regions = [memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)) for fd in fds]
        return cls(regions, layout, num_pages)

    async def take(self, pages: Sequence[int], pieces: Sequence[Piece]) -> bytes:
        """As `take_now`, in a thread, so that the event loop goes on. Cancelled, the thread ends by itself and has changed
        nothing."""
        return await asyncio.to_thread(self.take_now, list(pages), list(pieces))

    def take_now(self, pages: Sequence[int], pieces: Sequence[Piece]) -> bytes:
        """The digests of `pages` in order, of each page all layers in order; 4 bytes each, little-endian."""
        found = [self._digest(layer, page, pieces) for page in pages for layer in range(self._layout.all_layers)]
        return struct.pack(f"<{len(found)}I", *found)

    def _digest(self, layer: int, page: int, pieces: Sequence[Piece]) -> int:
        begin, crc = self._layout.offset(layer, page, self._num_pages), 0
        for piece in pieces:
            if piece.group != self._layout.group_of(layer):
                continue
            at = begin + piece.offset
            crc = zlib.crc32(self._regions[piece.rank][at : at + piece.length], crc)
        return crc
