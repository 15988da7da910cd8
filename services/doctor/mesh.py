"""The broker, and who announces itself on it: one thin listener, and what follows from what it heard."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from time import perf_counter

from services.doctor.findings import Finding
from shared import subjects
from shared.bus import Bus, Message
from shared.kv.shards import layouts_fit
from shared.messages import PROTOCOL, Announce, Discover, Role

ROUND_TRIPS = 100
SLOW_S = 0.005
"""A broker on the same network answers in a tenth of this."""

MOST_INSTANCES = 1024


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed. Raises `ValueError` for none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


async def round_trips(bus: Bus, count: int = ROUND_TRIPS) -> list[float]:
    """Seconds of messages to ourselves through the broker, one at a time: each is as long as one between two instances. Raises
    `BusError`."""
    times = []
    for _ in range(count):
        begin = perf_counter()
        await bus.flush()
        times.append(perf_counter() - begin)
    return times


def judge_broker(times: Sequence[float]) -> Finding:
    p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
    numbers = {"p50_s": p50, "p99_s": p99, "count": len(times)}
    said = f"a message takes {p50 * 1e3:.2f} ms p50, {p99 * 1e3:.2f} ms p99 of {len(times)}"
    if p50 > SLOW_S:
        todo = "every request pays it several times: put the broker nearer, or give it a core"
        return Finding("warn", "broker", f"{said}; {todo}", numbers)
    return Finding("ok", "broker", said, numbers)


async def listen(bus: Bus, seconds: float) -> list[Announce]:
    """The last announcement of each instance that speaks within `seconds` of being asked, without those that have left. Raises
    `BusError` where this user may not listen."""
    heard: dict[tuple[Role, str], Announce] = {}

    async def on_announce(message: Message[Announce]) -> None:
        key = message.body.role, message.body.instance.name
        if key in heard or len(heard) < MOST_INSTANCES:
            heard[key] = message.body

    subscription = await bus.subscribe(subjects.ANNOUNCE, Announce, on_announce)
    try:
        await bus.publish(subjects.DISCOVER, Discover())
        await asyncio.sleep(seconds)
    finally:
        await subscription.unsubscribe()
    return sorted((a for a in heard.values() if a.state != "left"), key=lambda a: (a.role, a.instance.name))


def fits(prefiller: Announce, decoder: Announce) -> bool:
    """Whether a router would pair them."""

    def kind(of: Announce) -> tuple[object, ...]:
        return of.protocol, of.model.digest, of.layout, of.verify, of.drafter

    return kind(prefiller) == kind(decoder) and layouts_fit(decoder.layout, prefiller.tp, decoder.tp)


def judge_pairs(instances: Sequence[Announce], malformed: int) -> list[Finding]:
    """Whether there is a pair that can serve. `malformed`: messages that did not decode."""
    findings = []
    if malformed:
        todo = "run one version of kvmesh everywhere"
        findings.append(Finding("warn", "versions", f"{malformed} announcements do not decode here: {todo}"))
    others = sorted({a.protocol for a in instances} - {PROTOCOL})
    if others:
        text = f"instances speak protocol {', '.join(map(str, others))}, this is {PROTOCOL}: run one version of kvmesh"
        findings.append(Finding("warn", "versions", text))
    ready = {role: [a for a in instances if a.role == role and a.state == "ready"] for role in ("prefill", "decode")}
    pairs = sum(fits(p, d) for p in ready["prefill"] for d in ready["decode"])
    numbers = {"prefillers": len(ready["prefill"]), "decoders": len(ready["decode"]), "pairs": pairs}
    lacking = [role for role, there in ready.items() if not there]
    if lacking:
        text = f"no {' and no '.join(lacking)} instance is ready: start one (kvmesh {lacking[0]}) on this broker"
    elif not pairs:
        text = "no prefill and decode instance fit together: the router's /ready names both values"
    else:
        text = f"{numbers['prefillers']} prefillers and {numbers['decoders']} decoders are ready, {pairs} pairs fit"
        return [*findings, Finding("ok", "pairs", text, numbers)]
    return [*findings, Finding("fail", "pairs", text, numbers)]


def measured(values: Sequence[float | None]) -> float | None:
    """The median of those that measured something."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
