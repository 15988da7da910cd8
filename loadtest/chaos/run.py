"""A whole run: the mesh, its clients, the faults, and the looks at it afterwards."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from loadtest.chaos.client import Wish, ask, draw_wish
from loadtest.chaos.faults import Faults
from loadtest.chaos.parts import Deployment, Part, parts, shm_folder
from loadtest.chaos.reference import Case
from loadtest.chaos.tally import Finding, Tally
from loadtest.chaos.verdict import Heard, Verdict, judge

HUNG_MARGIN_S = 10.0
READY_WITHIN_S = 90.0
IDLE_WITHIN_S = 20.0
STORM = 50
LAST_AT_ONCE = 4
TAIL_OF_LOG = 20

_PAGES = re.compile(r'kvmesh_pages\{dp_rank="\d+",state="(\w+)"\} (\S+)')
_INSTANCES = re.compile(r'kvmesh_instances\{role="\w+",state="ready"\} (\S+)')
_PREEMPTED = re.compile(r"^kvmesh_decode_preemptions_total (\S+)", re.MULTILINE)


class Plan(msgspec.Struct, frozen=True):
    """`every_s`: between two faults, on average. `think_s`: of a client between two requests, on average."""

    seed: int
    seconds: float
    clients: int = 32
    every_s: float = 2.5
    think_s: float = 0.3


class Run:
    """One run against parts that run already."""

    def __init__(self, plan: Plan, cases: list[Case], deployment: Deployment, running: dict[str, Part]) -> None:
        self._plan, self._cases, self._parts = plan, cases, running
        self._hung_after_s = deployment.request_timeout_s + HUNG_MARGIN_S
        self._deployment = deployment
        self._faults = Faults(running, deployment.network, self._storm)
        self._began = time.monotonic()
        self._storms = random.Random(plan.seed + 1)
        host, port = deployment.network.host("router"), _port(running["router"])
        self._url = f"http://{host}:{port}"
        self.tally = Tally(seed=plan.seed, network=bool(deployment.network.cuts))

    async def go(self, session: aiohttp.ClientSession) -> Tally:
        self._session = session
        shm = set(shm_folder(self._deployment).iterdir())
        await self._until_ready()
        self._began = time.monotonic()
        await self._under_fire()
        self.tally.seconds = time.monotonic() - self._began
        await self._until_ready()
        await self._all_once()
        await self._until_idle()
        self.tally.faults = self._faults.counts
        self.tally.ended = [
            f"{end.name}, status {end.status}" for part in self._parts.values() for end in part.ends if not end.meant
        ]
        await self._close_parts()
        self.tally.shm_left = sorted(path.name for path in set(shm_folder(self._deployment).iterdir()) - shm)
        return self.tally

    async def _under_fire(self) -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(self._plan.clients):
                group.create_task(self._client(random.Random(f"{self._plan.seed} {number}"), stop))
            group.create_task(self._watch_ledgers(stop))
            group.create_task(self._faults.run(random.Random(self._plan.seed), self._plan.every_s, stop))
            await asyncio.sleep(self._plan.seconds)
            stop.set()

    async def _client(self, draw: random.Random, stop: asyncio.Event) -> None:
        """A closed loop."""
        while not stop.is_set():
            await asyncio.sleep(draw.expovariate(1 / self._plan.think_s))
            await self._request(draw_wish(draw, self._cases, self._hung_after_s))

    async def _request(self, wish: Wish) -> Verdict:
        begin = time.monotonic()
        heard = await ask(self._session, self._url, wish)
        verdict = judge(wish.case, heard, router_hurt=self._router_hurt(begin))
        if verdict.kind == "hung" and self._last_word_lost(begin):
            verdict = Verdict("failed", "connection: the router's last word was lost with its link")
        self._count(verdict, heard, wish, begin)
        return verdict

    def _count(self, verdict: Verdict, heard: Heard, wish: Wish, begin: float) -> None:
        tally = self.tally
        tally.verdicts[verdict.kind] += 1
        if verdict.kind == "right":
            tally.retried += (heard.tries or 1) > 1
            tally.left += heard.left
        elif verdict.kind in ("refused", "failed"):
            tally.reasons[re.sub(r"[0-9a-f]{32}|\d+\.\d+", "...", f"{verdict.kind} {verdict.why}")] += 1
        else:
            took = time.monotonic() - begin
            self._find(verdict.kind, f"{wish.manner} of case {wish.case.number}, {took:.1f} s: {verdict.why}", begin)

    def _find(self, kind: str, what: str, since: float) -> None:
        now = time.monotonic()
        faults = [
            f"{incident.fault.kind} of {incident.fault.victim} at {incident.begin - self._began:.1f} s"
            + (" (still)" if incident.end is None else f" to {incident.end - self._began:.1f} s")
            for incident in self._faults.last
            if incident.touches(since - 5.0, now)
        ]
        self.tally.findings.append(Finding(now - self._began, kind, what, faults))
        print(f"{kind} at {now - self._began:.1f} s: {what}\n  after " + "; ".join(faults), flush=True)

    def _router_hurt(self, begin: float) -> bool:
        return bool(self._faults.of_router(begin))

    def _last_word_lost(self, begin: float) -> bool:
        """The router was killed while it was cut off: its end of a connection went without the other hearing of it."""
        kinds = self._faults.of_router(begin)
        return bool(kinds & {"kill -9", "SIGTERM"}) and bool(kinds & set(self._deployment.network.cuts))

    async def _storm(self) -> None:
        """Fifty requests that all leave in the same moment."""
        patience_s = self._storms.uniform(0.01, 0.6)
        wishes = [Wish(self._storms.choice(self._cases), "leaver", patience_s) for _ in range(STORM)]
        await asyncio.gather(*map(self._request, wishes))

    async def _watch_ledgers(self, stop: asyncio.Event) -> None:
        """A ledger that does not balance is a page lost, whenever it is seen."""
        while not stop.is_set():
            for part in self._instances():
                await self._balanced(part)
            await asyncio.sleep(1.0)

    def _instances(self) -> list[Part]:
        return [part for name, part in self._parts.items() if name.startswith(("prefill", "decode")) and part.url]

    async def _balanced(self, part: Part) -> None:
        text = await self._get(f"{part.url}/integrity")
        if text is not None and text != "balanced\n":
            self.tally.pages_lost += 1
            self._find("lost", f"{part.name}: {text.strip()}", time.monotonic())

    async def _get(self, url: str) -> str | None:
        """None where it does not answer at the moment."""
        try:
            async with asyncio.timeout(2.0), self._session.get(url) as answer:
                return await answer.text()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def _until_ready(self) -> None:
        """Raises `RuntimeError` where the mesh does not come (back) to two ready instances of each role."""
        end = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < end:
            if all(part.ready.is_set() for part in self._parts.values()):
                metrics = await self._get(f"{self._url}/metrics") or ""
                if [float(count) for count in _INSTANCES.findall(metrics)] == [2, 2]:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the mesh is not ready after {READY_WITHIN_S:g} s: {self._states()}")

    def _states(self) -> str:
        return ", ".join(f"{n} {'ready' if part.ready.is_set() else 'not ready'}" for n, part in self._parts.items())

    async def _all_once(self) -> None:
        """Every prompt, with nothing wrong any more: each must be answered, and right."""
        places = asyncio.Semaphore(LAST_AT_ONCE)

        async def one(case: Case, *, stream: bool) -> None:
            async with places:
                begin = time.monotonic()
                verdict = await self._request(Wish(case, "stream" if stream else "whole", self._hung_after_s))
            if verdict.kind in ("refused", "failed"):
                self.tally.verdicts[verdict.kind] -= 1
                self.tally.verdicts["wrong"] += 1
                self._find("wrong", f"case {case.number} after the faults: {verdict.why}", begin)

        await asyncio.gather(*(one(case, stream=case.number % 2 == 0) for case in self._cases))

    async def _until_idle(self) -> None:
        """Every page must come back; those that do not are lost."""
        end = time.monotonic() + IDLE_WITHIN_S
        while (held := await self._held()) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for name, count in held.items():
            self.tally.pages_lost += count
            self._find("lost", f"{name} still holds {count} pages", time.monotonic())
        for part in self._instances():
            await self._balanced(part)
            if preempted := _PREEMPTED.search(await self._get(f"{part.url}/metrics") or ""):
                self.tally.preempted += int(float(preempted[1]))

    async def _held(self) -> dict[str, int]:
        """Name → pages that are not free, of those that have some."""
        held = {}
        for part in self._instances():
            pages = _PAGES.findall(await self._get(f"{part.url}/metrics") or "")
            count = int(sum(float(count) for state, count in pages if state != "free")) if pages else 1
            if count:
                held[part.name] = count
        return held

    async def _close_parts(self) -> None:
        await close(self._parts)


def _port(router: Part) -> str:
    return router.environment["KVMESH_PORT"]


async def close(running: dict[str, Part]) -> None:
    """The broker last. Idempotent."""
    others = [part for name, part in running.items() if name != "broker"]
    await asyncio.gather(*(part.close(10.0) for part in others))
    await running["broker"].close(2.0)


@asynccontextmanager
async def supervised(deployment: Deployment) -> AsyncIterator[dict[str, Part]]:
    """All parts, started again whenever they end, until the block is left."""
    running = parts(deployment)
    async with asyncio.TaskGroup() as group:
        for part in running.values():
            group.create_task(part.run())
        try:
            yield running
        finally:
            await close(running)


async def chaos(plan: Plan, cases: list[Case], deployment: Deployment) -> Tally:
    """Raises `RuntimeError` where the mesh does not become ready."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        supervised(deployment) as running,
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=512) as session,
    ):
        return await Run(plan, cases, deployment, running).go(session)


def end_of_logs(folder: Path) -> str:
    """The last lines of every part's log."""
    parts_of = [
        f"{log.stem}:\n" + "\n".join(log.read_text().splitlines()[-TAIL_OF_LOG:]) for log in folder.glob("*.log")
    ]
    return "\n\n".join(parts_of)
