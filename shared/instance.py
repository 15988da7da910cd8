"""What a prefill and a decode instance have in common: an identity, a model, an executor, a fabric with the KV region, a place
on the bus; and the heartbeats that say so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared import subjects
from shared.bus import Bus, Message
from shared.config import InstanceSettings
from shared.engine.interface import StepRunner
from shared.errors import BusError
from shared.kv.digests import PageDigests
from shared.kv.ledger import PagePool
from shared.layout import KvLayout
from shared.messages import Announce, Discover, FabricEndpoint, InstanceRef, Load, ModelIdentity, Role, State
from shared.transfer import interface

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """Everything is open; whoever opened it closes it (`shared.opening`)."""

    role: Role
    ref: InstanceRef
    settings: InstanceSettings
    identity: ModelIdentity
    layout: KvLayout
    """The whole model's."""
    pools: list[PagePool]
    """One a data parallel rank, all of one size."""
    executor: StepRunner
    fabric: interface.Fabric
    regions: list[interface.MemoryRegion]
    """One a rank, in the executor's order, each of the rank's heads of all pages of its data parallel rank's pool."""
    bus: Bus
    directory: Path
    """The model's."""
    eos_token_ids: tuple[int, ...]
    """The model's own tokens that end an output."""
    drafter: str = ""
    """As in `Announce`."""
    hidden_bytes: int = 0
    """Of the hidden state that the tail carries for a multi-token prediction layer; 0: none."""

    @property
    def tp(self) -> int:
        """Tensor parallel."""
        return self.executor.tp

    @property
    def dp(self) -> int:
        """Data parallel."""
        return self.executor.dp

    @property
    def ep(self) -> int:
        """Expert parallel."""
        return self.executor.ep

    @property
    def most_digested_pages(self) -> int:
        """Pages of the longest prompt whose digests travel; 0 where `verify` is "no"."""
        if self.settings.verify == "no":
            return 0
        return min(self.layout.pages_for(self.identity.max_positions), self.pools[0].num_pages)

    def page_digests(self, dp_rank: int) -> PageDigests | None:
        """Of that data parallel rank's pool; None where `verify` is "no"."""
        if self.settings.verify == "no":
            return None
        fds = self.executor.kv_fds[dp_rank * self.tp : (dp_rank + 1) * self.tp]
        return PageDigests.mapped(fds, self.executor.layout, self.pools[dp_rank].num_pages)

    @property
    def endpoint(self) -> FabricEndpoint:
        return FabricEndpoint(self.fabric.provider, self.fabric.address)


class Announcer:
    """Publishes this instance's heartbeats: every `heartbeat_s`, when asked by a router, and at every change of state."""

    def __init__(self, instance: Instance, load: Callable[[], Load], *, max_batch: int, http: str) -> None:
        self._instance = instance
        self._load = load
        self._max_batch = max_batch
        self._http = http
        self._state: State = "ready"
        self._now = asyncio.Event()

    @property
    def state(self) -> State:
        return self._state

    def poke(self) -> None:
        """The next heartbeat now."""
        self._now.set()

    async def run(self) -> None:
        """Until cancelled."""
        bus = self._instance.bus
        await bus.subscribe(subjects.DISCOVER, Discover, self._on_discover)
        bus.on_reconnect(self.poke)
        while True:
            await self.publish()
            self._now.clear()
            try:
                async with asyncio.timeout(self._instance.settings.heartbeat_s):
                    await self._now.wait()
            except TimeoutError:
                continue

    async def change(self, state: State) -> None:
        self._state = state
        await self.publish()

    async def publish(self) -> None:
        try:
            await self._instance.bus.publish(subjects.ANNOUNCE, self.announce())
        except BusError as error:
            log.debug("no heartbeat: %s", error)

    def announce(self) -> Announce:
        instance = self._instance
        return Announce(
            role=instance.role,
            instance=instance.ref,
            state=self._state,
            model=instance.identity,
            layout=instance.layout,
            fabric=instance.endpoint,
            max_batch=self._max_batch,
            load=self._load(),
            http=self._http,
            tp=instance.tp,
            dp=instance.dp,
            ep=instance.ep,
            verify=instance.settings.verify,
            drafter=instance.drafter,
        )

    async def _on_discover(self, _: Message[Discover]) -> None:
        self.poke()
