"""The router on the bus: who is there, what they emit, and who has fallen silent."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from services.router.metrics import RouterMetrics
from services.router.model import ServedModel
from services.router.registry import Registry
from services.router.relay import Relay
from services.router.validate import Limits
from shared import subjects
from shared.bus import Bus, Message
from shared.config import RouterSettings
from shared.errors import BusError
from shared.grammar import Compiler, Vocabulary
from shared.messages import Accepted, Announce, Discover, EmitBatch, InstanceRef, StreamStatus, ToRouter
from shared.web.health import Readiness

log = logging.getLogger(__name__)

_NOTED = Accepted("")

STATUS_GRACE_S = 2.0
"""A decoder speaks of every attempt once a second; it may miss one turn beyond the time in which it would count as dead."""


class RouterService:
    """Registry and relay, fed from the bus. `start` subscribes; `run` watches until it is cancelled."""

    def __init__(
        self, me: InstanceRef, settings: RouterSettings, bus: Bus, model: ServedModel, metrics: RouterMetrics
    ) -> None:
        self.me, self.settings, self.model, self.metrics = me, settings, model, metrics
        self._bus = bus
        self.registry = Registry(model.identity, settings.dead_after_s)
        self.relay = Relay(me, settings, bus, self.registry, metrics)
        self.grammars = Compiler(Vocabulary(model.tokenizer.to_str, model.identity.vocab_size, model.eos_token_ids))
        self.draining = False
        self._loop = asyncio.get_running_loop()
        self._discover = asyncio.Event()
        self._add_gauges()

    async def start(self) -> None:
        """Listens, then asks everyone to say that they are there."""
        await self._bus.subscribe(subjects.inbox("router", self.me), ToRouter, self._on_message)
        await self._bus.subscribe(subjects.ANNOUNCE, Announce, self._on_announce)
        self._bus.on_reconnect(self._discover.set)
        await self._bus.publish(subjects.DISCOVER, Discover())

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.relay.courier.run())
            tasks.create_task(self._watch())
            tasks.create_task(self._rediscover())

    def readiness(self) -> Readiness:
        reason = self._unready()
        detail: dict[str, Any] = {"model": self.model.name, "instances": [_shown(k) for k in self._announced()]}
        if mismatches := self.registry.mismatches():
            detail["mismatches"] = mismatches
        return Readiness(reason=reason, detail=detail)

    def limits(self) -> Limits:
        """What fits now: see `Limits`."""
        registry = self.registry
        pools = [k.announce.pool_pages * k.announce.layout.page_size for k in registry.decoders]
        sources = [k.announce.pool_pages * k.announce.layout.page_size for k in registry.prefillers]
        return Limits(self.model.max_positions, max(pools, default=None), max(sources, default=None))

    def _unready(self) -> str | None:
        if self.draining:
            return "this router is shutting down"
        if not self._bus.connected:
            return "the broker is away"
        return self.registry.missing()

    def _announced(self) -> list[Announce]:
        return [known.announce for known in self.registry.instances]

    async def _on_message(self, message: Message[ToRouter]) -> None:
        now = self._loop.time()
        match message.body:
            case EmitBatch():
                self.relay.table.on_batch(message.body, now)
                if len(self.relay.line):
                    self.relay.line.kick()  # a first token opens what was half open
            case StreamStatus():
                for attempt in self.relay.table.on_status(message.body, now):
                    self.relay.courier.cancel(attempt, message.body.decoder, "this router has it no more")
                await message.reply(_NOTED)

    async def _on_announce(self, message: Message[Announce]) -> None:
        for ref, why in self.registry.observe(message.body, self._loop.time()):
            self._lost(ref, why)
        self.relay.line.kick()

    def _lost(self, ref: InstanceRef, why: str) -> None:
        self.relay.table.on_lost(ref, why)
        self.relay.courier.forget(ref)

    async def _watch(self) -> None:
        """Counts silence, but only while this router can hear: each tick it must hear itself, and in time; a tick that came
        late says that this process stood still."""
        tick_s = self.settings.dead_after_s / 4
        while True:
            before = self._loop.time()
            await asyncio.sleep(tick_s)
            hears = await self._hears(tick_s)
            now = self._loop.time()
            if hears and now - before < 3 * tick_s:
                self._sweep(now)
            else:
                self.registry.pardon(now)
                self.relay.table.pardon(now)

    def _sweep(self, now: float) -> None:
        dead_after_s = self.settings.dead_after_s
        for ref in self.registry.sweep(now):
            self._lost(ref, f"was silent for more than {dead_after_s:g} s")
        self.relay.table.sweep(now, dead_after_s + STATUS_GRACE_S)
        self.relay.line.kick()

    async def _hears(self, timeout_s: float) -> bool:
        """Whether a message through the broker reaches this router's own inbox. An empty status of its own says nothing
        about anybody's attempts."""
        echo = StreamStatus(decoder=self.me, router=self.me, emitted={})
        try:
            await self._bus.request(subjects.inbox("router", self.me), echo, Accepted, timeout_s=timeout_s)
        except BusError:
            return False
        return True

    async def _rediscover(self) -> None:
        """After every reconnection: others may have come or gone meanwhile."""
        while True:
            await self._discover.wait()
            self._discover.clear()
            now = self._loop.time()
            self.registry.pardon(now)
            self.relay.table.pardon(now)
            try:
                await self._bus.publish(subjects.DISCOVER, Discover())
            except BusError as error:
                log.info("the broker went away again: %s", error)

    def _add_gauges(self) -> None:
        read, relay = self.metrics.read, self.relay
        read("kvmesh_queue_depth", "Requests that wait at the router for room", lambda: len(relay.line))
        read("kvmesh_attempts_open", "Attempts that run now", lambda: len(relay.table))
        read("kvmesh_cancels_due", "Cancels that wait for the broker", lambda: len(relay.courier))
        read("kvmesh_late_messages", "Messages about attempts that had ended", lambda: relay.table.late)
        half_open = "Instances that get one request at a time until one has succeeded"
        read("kvmesh_half_open_instances", half_open, lambda: sum(k.half_open for k in self.registry.instances))
        self.metrics.read_instances(
            lambda role, state: sum(a.role == role and a.state == state for a in self._announced())
        )


def _shown(announce: Announce) -> dict[str, Any]:
    return {
        "role": announce.role,
        "name": announce.instance.name,
        "incarnation": f"{announce.instance.incarnation:016x}",
        "state": announce.state,
        "tp": announce.tp,
        "dp": announce.dp,
        "ep": announce.ep,
        "load": msgspec.to_builtins(announce.load),
    }
