"""Opens an instance: resolves the model, starts the executor, opens the fabric, connects to the broker; closes in order."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from shared import subjects
from shared.bus import Bus
from shared.config import InstanceSettings
from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.errors import ConfigError
from shared.instance import Instance
from shared.kv.ledger import PagePool
from shared.messages import InstanceRef, ModelIdentity, Role
from shared.models.config import load_config
from shared.models.digest import model_digest
from shared.models.source import resolve
from shared.transfer.fabric import Fabric
from shared.transfer.interface import MemoryRegion


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
    config = load_config(path)
    layout = config.layout(
        page_size=settings.page_size, dtype=config.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    )
    identity = ModelIdentity(
        name=settings.model,
        digest=await asyncio.to_thread(model_digest, path),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus.connect(settings.nats_url, token=settings.nats_token, name=ref.name))
        group = await stack.enter_async_context(
            ExecutorGroup.start(
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
        regions: list[MemoryRegion] = [fabric.register(fd, group.kv_bytes) for fd in group.kv_fds]
        for region in regions:
            stack.callback(region.close)
        yield Instance(
            role, ref, settings, identity, layout, PagePool(pool_pages(settings)), group, fabric, regions, bus
        )
