"""What a prefill and a decode instance have in common: a model, an executor, a fabric with the KV region, a place on the bus,
and the heartbeats that say so."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shared import subjects
from shared.bus import Bus, Message
from shared.config import InstanceSettings
from shared.engine.client import Executor, ExecutorConfig
from shared.errors import BusError, ConfigError
from shared.kv.ledger import PagePool
from shared.layout import KvDtype, KvLayout
from shared.messages import Announce, Discover, FabricEndpoint, InstanceRef, Load, ModelIdentity, Role, State
from shared.models.config import ModelConfig
from shared.models.source import model_digest, resolve
from shared.transfer.fabric import Fabric
from shared.transfer.interface import MemoryRegion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """Everything is open; `open_instance` closes it in order."""

    role: Role
    ref: InstanceRef
    settings: InstanceSettings
    identity: ModelIdentity
    config: ModelConfig
    layout: KvLayout
    pool: PagePool
    executor: Executor
    fabric: Fabric
    region: MemoryRegion
    bus: Bus

    @property
    def endpoint(self) -> FabricEndpoint:
        return FabricEndpoint(self.fabric.provider, self.fabric.address)


def layout_of(config: ModelConfig, settings: InstanceSettings) -> KvLayout:
    """The layout this instance's pages have."""
    dtype: KvDtype = config.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=settings.page_size,
        dtype=dtype,
    )


def pool_pages(settings: InstanceSettings) -> int:
    """Pages in the pool; raises `ConfigError` where the pool would hold none."""
    pages = settings.kv_tokens // settings.page_size
    if pages < 1:
        raise ConfigError("KVMESH_KV_TOKENS", settings.kv_tokens, f"at least KVMESH_PAGE_SIZE ({settings.page_size})")
    return pages


@asynccontextmanager
async def open_instance(role: Role, settings: InstanceSettings, threads: int) -> AsyncIterator[Instance]:
    """Loads the model and opens executor, fabric and bus. Raises `ConfigError`, `ModelError`, `EngineError`, `FabricError`
    or `BusError`, each naming what was wrong."""
    ref = InstanceRef(subjects.check_name("KVMESH_NAME", settings.name), secrets.randbits(64))
    path = await asyncio.to_thread(resolve, settings.model)
    config = ModelConfig.load(path)
    layout = layout_of(config, settings)
    identity = ModelIdentity(
        name=settings.model,
        digest=await asyncio.to_thread(model_digest, path),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus.connect(settings.nats_url, token=settings.nats_token, name=ref.name))
        executor = await stack.enter_async_context(
            Executor.start(
                ExecutorConfig(
                    model=str(path),
                    weights_dtype=settings.weights_dtype,
                    layout=layout,
                    num_pages=pool_pages(settings),
                    threads=threads,
                    purpose=role,
                    load_timeout_s=settings.load_timeout_s,
                )
            )
        )
        fabric = await Fabric.open(provider=settings.fabric, host=settings.fabric_host, identity=ref.incarnation)
        stack.push_async_callback(fabric.close)
        region = fabric.register(executor.kv_fd, executor.kv_bytes)
        stack.callback(region.close)
        yield Instance(
            role, ref, settings, identity, config, layout, PagePool(pool_pages(settings)), executor, fabric, region, bus
        )


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
        )

    async def _on_discover(self, _: Message[Discover]) -> None:
        self.poke()
