"""Below which prompt length splitting does not pay. Pure.

The comparison is with one engine of the same speed that does both. With a prompt of n tokens, P prefill tokens/s, s seconds a
decode step, h seconds a message between instances, x seconds of transfer that no compute hides, and B streams that decode:

    TTFT mixed       = n / P
    TTFT split       = n / P + x + h + 1.5 s
    cost of split    = x + h + 1.5 s          seconds, once, for the one who waits for the first token
    cost of mixed    = B n / P                seconds, summed over the B streams that stand still while the prompt is computed
    break-even       n = P (x + h + 1.5 s) / B

1.5 s: the decoder takes the request in at its next step, half a step away on average, and computes the prompt's last token in
that step, where a mixed engine has its first token from the prefill. h: the decoder's message to the prefiller.

Left out: a decoding row in a prefill's step is nearly free on a device that is not full; a second of a stream's gap and a second
before the first token count the same; chunks share the stall out over several gaps and leave its sum; both sides queue as long;
x is the same for every n, because it is what remains after the last layer of the last chunk.
"""

from __future__ import annotations

import math

import msgspec

STEPS = 1.5
"""Decode steps to the first token after the KV is there."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """What the mesh says of itself; None: nothing was measured yet."""

    prefill_tokens_per_s: float | None
    step_s: float | None
    exposed_s: float | None
    hop_s: float | None

    @property
    def missing(self) -> list[str]:
        """Names of what was not measured (or is not above 0, where it must be)."""
        names = [name for name in self.__struct_fields__ if getattr(self, name) is None]
        return names if self.prefill_tokens_per_s != 0 else ["prefill_tokens_per_s", *names]


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Splitting pays from `tokens` prompt tokens on, where `streams` decode. `cost_s`: what it adds to TTFT."""

    streams: int
    cost_s: float
    tokens: int


def break_even(speeds: Speeds, streams: int) -> BreakEven | None:
    """None where something of `speeds` is missing. `streams` below 1 is a `ValueError`: nobody is there to be disturbed."""
    if streams < 1:
        raise ValueError("a prefill disturbs at least one stream, or none is to be spared")
    rate, step, exposed, hop = speeds.prefill_tokens_per_s, speeds.step_s, speeds.exposed_s, speeds.hop_s
    if not rate or step is None or exposed is None or hop is None:
        return None
    cost = exposed + hop + STEPS * step
    return BreakEven(streams=streams, cost_s=cost, tokens=math.ceil(rate * cost / streams))
