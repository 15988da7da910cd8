"""Slots of a decoder: one for each attempt whose KV is on its way. A slot gives the immediate and the place of the tail.

A slot is recycled only together with the attempt's pages, so a late write can never count for another attempt; beyond that
the immediate carries the slot's generation, so that one would not even look alike.
"""

from __future__ import annotations

from collections import deque

import msgspec

from shared.kv.tail import SLOT_BYTES

_SLOT_BITS = 16


class Slot(msgspec.Struct, frozen=True):
    """`immediate` is generation (upper 16 bits) and index (lower 16 bits)."""

    index: int
    immediate: int
    tail_offset: int
    """Byte offset of its tail context in the region of tails."""


class SlotPool:
    """`count` slots, at most 65536, each of `slot_bytes` for the tail context."""

    def __init__(self, count: int, slot_bytes: int = SLOT_BYTES) -> None:
        if not 0 < count <= 1 << _SLOT_BITS:
            raise ValueError(f"count={count}: takes 1 to {1 << _SLOT_BITS}")
        self.count = count
        self.slot_bytes = slot_bytes
        self._free: deque[int] = deque(range(count))
        self._generation = [0] * count
        self._taken: set[int] = set()

    @property
    def region_bytes(self) -> int:
        return self.count * self.slot_bytes

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot | None:
        """A slot; None where all are taken."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._taken.add(index)
        self._generation[index] = (self._generation[index] + 1) & 0xFFFF
        return Slot(index, self._generation[index] << _SLOT_BITS | index, index * self.slot_bytes)

    def give_back(self, slot: Slot) -> None:
        """Only once no write with its immediate can arrive any more."""
        self._taken.remove(slot.index)
        self._free.append(slot.index)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a slot is lost or doubled."""
        assert sorted([*self._free, *self._taken]) == list(range(self.count)), "slots are lost or doubled"
