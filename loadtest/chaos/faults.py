"""What goes wrong, to whom and when: drawn from one seed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from loadtest.chaos.network import Network
from loadtest.chaos.parts import Part, until

SHORTEST_S, LONGEST_S = 0.3, 6.0
"""How long a part is frozen or cut off."""

BACK_WITHIN_S = 60.0

STORM = "storm of cancels"

Storm = Callable[[], Awaitable[None]]


class Fault(msgspec.Struct, frozen=True):
    kind: str
    victim: str
    lasts_s: float


class Incident(msgspec.Struct):
    """A fault that was injected. `end`: None until its victim is as before; seconds of `time.monotonic`."""

    fault: Fault
    begin: float
    end: float | None = None

    def touches(self, begin: float, end: float) -> bool:
        """Whether it lay in, or just before, a time from `begin` to `end`."""
        return self.begin <= end and (self.end is None or self.end + 1.0 >= begin)


def draw_fault(draw: random.Random, names: list[str], cuts: tuple[str, ...]) -> Fault:
    """Every kind, and of it every victim, is as likely as the next."""
    instances = [name for name in names if name not in ("broker", "router")]
    executors = [f"{name}'s executor" for name in instances]
    kinds = {
        "kill -9": [*names, *executors],
        "freeze": [*names, *executors],
        "SIGTERM": [*instances, "router"],
        STORM: ["router"],
        **dict.fromkeys(cuts, names),
    }
    kind = draw.choice(list(kinds))
    return Fault(kind, draw.choice(kinds[kind]), draw.uniform(SHORTEST_S, LONGEST_S))


class Faults:
    """`last` are the newest incidents, for whoever explains an answer."""

    def __init__(self, parts: dict[str, Part], network: Network, storm: Storm) -> None:
        self._parts, self._network, self._storm = parts, network, storm
        self._cut: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.last: deque[Incident] = deque(maxlen=64)

    async def run(self, draw: random.Random, every_s: float, stop: asyncio.Event) -> None:
        """One after another until `stop`, some at once; returns when each has been undone."""
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(draw.uniform(0.2, 1.8) * every_s):
                        await stop.wait()
                fault = draw_fault(draw, list(self._parts), self._network.cuts)
                if not stop.is_set():
                    group.create_task(self.inject(fault))

    def of_router(self, since: float) -> set[str]:
        """Kinds of what was done to the router itself since then."""
        now = time.monotonic()
        touching = [incident for incident in self.last if incident.touches(since, now)]
        return {i.fault.kind for i in touching if i.fault.victim == "router"} - {STORM}

    async def inject(self, fault: Fault) -> None:
        """Until it is undone. A victim that does not run at the moment is left alone, and not counted."""
        incident = Incident(fault, time.monotonic())
        name, _, executor = fault.victim.partition("'s ")
        part = self._parts[name]
        if part.pid is None:
            return
        self.counts[f"{fault.kind}: {executor or name.split('-')[0]}"] += 1
        self.last.append(incident)
        try:
            await self._do(fault, part, of_executor=bool(executor))
        finally:
            incident.end = time.monotonic()

    async def _do(self, fault: Fault, part: Part, *, of_executor: bool) -> None:
        match fault.kind:
            case "kill -9":
                await self._end(part, signal.SIGKILL, of_executor=of_executor)
            case "SIGTERM":
                await self._end(part, signal.SIGTERM, of_executor=False)
            case "freeze":
                await _freeze(part, fault.lasts_s, of_executor=of_executor)
            case "storm of cancels":
                await self._storm()
            case "link down" | "all packets lost" as how:
                await self._cut_off(part.name, how, fault.lasts_s)
            case kind:
                raise ValueError(f"no fault {kind!r}")

    async def _end(self, part: Part, number: int, *, of_executor: bool) -> None:
        starts = part.starts
        part.excused = True
        if of_executor:
            for pid in part.executors():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        else:
            part.signal(number)
        await until(lambda: part.starts > starts and part.ready.is_set(), BACK_WITHIN_S)

    async def _cut_off(self, name: str, how: str, lasts_s: float) -> None:
        self._cut[name] += 1
        try:
            await self._network.cut(name, "link down" if how == "link down" else "all packets lost")
            await asyncio.sleep(lasts_s)
        finally:
            self._cut[name] -= 1
            if not self._cut[name]:
                await self._network.heal(name)


async def _freeze(part: Part, lasts_s: float, *, of_executor: bool) -> None:
    pid = part.pid
    victims = part.executors() if of_executor else [pid] if pid is not None else []
    part.excused = True
    try:
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(lasts_s)
    finally:
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
