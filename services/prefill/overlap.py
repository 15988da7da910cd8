"""How much of a transfer was hidden behind compute. Pure interval arithmetic on CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

Interval = tuple[int, int]


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """`transfer_ns`: time in which at least one write was in flight. `hidden_ns`: the part of it in which a forward ran.
    `exposed_ns`: from the end of the last forward to the last completion; 0 where that came first."""

    transfer_ns: int
    hidden_ns: int
    exposed_ns: int

    @property
    def hidden_ratio(self) -> float:
        """1.0 where nothing was transferred."""
        return self.hidden_ns / self.transfer_ns if self.transfer_ns else 1.0


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def measure(transfers: Sequence[Interval], forwards: Sequence[Interval]) -> Overlap:
    """Of writes (posted, completed) and forwards (begin, end) of one attempt."""
    sent, computed = union(transfers), union(forwards)
    hidden = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in sent for b in computed)
    last_sent = max((end for _, end in sent), default=0)
    last_computed = max((end for _, end in computed), default=0)
    return Overlap(
        transfer_ns=sum(end - begin for begin, end in sent),
        hidden_ns=hidden,
        exposed_ns=max(0, last_sent - last_computed) if sent and computed else 0,
    )
