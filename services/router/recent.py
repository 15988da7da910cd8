"""The last requests that ended: where their time went. Bounded, and without a word of what was asked or answered."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

KEPT = 100
"""Requests that are remembered."""

Outcome = Literal["ok", "failed"]


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a request, seconds. What is None was never measured: the request did not come so far, or, for the decoder's
    two times, what the decoder said ended with its attempt."""

    ended_unix_s: float
    outcome: Outcome
    """"failed" is everything but a complete answer; also where the client left."""
    prefiller: str | None
    decoder: str | None
    tries: int | None
    prompt_tokens: int
    output_tokens: int | None
    total_s: float
    queue_s: float
    """Waits at the router for room on a pair, of all tries."""
    kv_wait_s: float | None
    """From admission to KV ready, by the decoder."""
    first_step_s: float | None
    """By the decoder."""
    ttft_s: float | None
    stream_s: float | None
    """From the first tokens to the last."""

    @property
    def itl_s(self) -> float | None:
        """Mean time between the tokens of this request."""
        if self.stream_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return self.stream_s / (self.output_tokens - 1)


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds, over `count` requests."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class Recent:
    """The last `kept` requests, oldest first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._requests: deque[Finished] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, finished: Finished) -> None:
        self._requests.append(finished)

    def requests(self) -> list[Finished]:
        return list(self._requests)

    def ttft(self) -> Percentiles:
        return percentiles([one.ttft_s for one in self._ok() if one.ttft_s is not None])

    def itl(self) -> Percentiles:
        """Of the requests' means: each request counts once, however long it is."""
        return percentiles([itl for one in self._ok() if (itl := one.itl_s) is not None])

    def _ok(self) -> list[Finished]:
        return [one for one in self._requests if one.outcome == "ok"]


def percentiles(values: Sequence[float]) -> Percentiles:
    """By the nearest rank: the smallest value that so many of 100 do not exceed."""
    ordered = sorted(values)
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered) / 100) - 1] if ordered else None for share in (50, 90, 99))
    return Percentiles(len(ordered), p50, p90, p99)
