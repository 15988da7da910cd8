"""Opens an instance: resolves the model, starts the executor, opens the fabric, connects to the broker; closes in order."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from shared import subjects
from shared.bus import Access, Bus
from shared.config import DecodeSettings, InstanceSettings, proposer
from shared.drafting import find_drafter
from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.errors import ConfigError, ModelError
from shared.instance import Instance
from shared.kv.ledger import PagePool
from shared.messages import InstanceRef, ModelIdentity, Role
from shared.models.config import ModelConfig, load_config
from shared.models.digest import model_digest
from shared.models.shard import Shard
from shared.models.source import resolve
from shared.transfer.fabric import Fabric
from shared.transfer.interface import MemoryRegion


def data_parallel(settings: InstanceSettings) -> int:
    """A prefiller has one data parallel rank: what is written to a decoder looks the same, however many that one has."""
    return settings.dp if isinstance(settings, DecodeSettings) else 1


def threads_of(settings: InstanceSettings) -> int:
    """Of each executor: as set, or its share of all cores this process may use, at least one."""
    executors = settings.tp * data_parallel(settings)
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // executors)


def check_ranks(settings: InstanceSettings, config: ModelConfig) -> None:
    """Raises `ConfigError` where the model cannot be split so: heads and the like over tensor parallel ranks, experts over all
    ranks where there are several data parallel ones."""
    tp, dp = settings.tp, data_parallel(settings)
    if _splits(config, tp, dp):
        return
    ways = [n for n in range(1, config.heads + 1) if _splits(config, n, 1)]
    if tp not in ways:
        raise ConfigError("KVMESH_TP", tp, f"one of {', '.join(map(str, ways))} for this model")
    count = config.experts.count if config.experts else 1
    ways = [n for n in range(1, count + 1) if _splits(config, tp, n)]
    takes = f"one of {', '.join(map(str, ways))} for the {count} experts of this model with KVMESH_TP={tp}"
    raise ConfigError("KVMESH_DP", dp, takes)


def _splits(config: ModelConfig, tp: int, dp: int) -> bool:
    try:
        Shard(ranks=tp, ep=tp * dp if config.experts and dp > 1 else 1).config(config)
    except ModelError:
        return False
    return True


def pool_pages(settings: InstanceSettings) -> int:
    """Pages in each pool; raises `ConfigError` where the pool would hold none."""
    pages = settings.kv_tokens // settings.page_size
    if pages < 1:
        raise ConfigError("KVMESH_KV_TOKENS", settings.kv_tokens, f"at least KVMESH_PAGE_SIZE ({settings.page_size})")
    return pages


@asynccontextmanager
async def open_instance(role: Role, settings: InstanceSettings) -> AsyncIterator[Instance]:
    """Loads the model and opens executors, fabric and bus. Raises `ConfigError`, `ModelError`, `EngineError`, `FabricError`
    or `BusError`, each naming what was wrong."""
    ref = InstanceRef(subjects.check_name("KVMESH_NAME", settings.name), secrets.randbits(64))
    proposing = proposer(settings)
    path = await asyncio.to_thread(resolve, settings.model)
    config = load_config(path)
    check_ranks(settings, config)
    drafting = await asyncio.to_thread(find_drafter, proposing, path, config, settings.tp)
    pools = [PagePool(pool_pages(settings)) for _ in range(data_parallel(settings))]
    layout = config.layout(
        page_size=settings.page_size,
        dtype=config.dtype if settings.kv_dtype == "auto" else settings.kv_dtype,
        mtp=drafting.kind == "mtp",
        draft=drafting.config,
    )
    identity = ModelIdentity(
        name=settings.model,
        digest=await asyncio.to_thread(model_digest, path),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus.connect(Access.of(settings), name=ref.name))
        group = await stack.enter_async_context(
            ExecutorGroup.start(
                ExecutorConfig(
                    model=str(path),
                    weights_dtype=settings.weights_dtype,
                    layout=layout,
                    num_pages=pool_pages(settings),
                    threads=threads_of(settings),
                    purpose=role,
                    drafter=drafting.kind,
                    draft_model=drafting.directory,
                    load_timeout_s=settings.load_timeout_s,
                ),
                tp=settings.tp,
                dp=data_parallel(settings),
            )
        )
        fabric = await Fabric.open(provider=settings.fabric, host=settings.fabric_host, identity=ref.incarnation)
        stack.push_async_callback(fabric.close)
        regions: list[MemoryRegion] = [fabric.register(fd, group.kv_bytes) for fd in group.kv_fds]
        for region in regions:
            stack.callback(region.close)
        yield Instance(
            *(role, ref, settings, identity, layout, pools, group, fabric, regions, bus, path, tuple(config.eos_ids)),
            drafter=drafting.name,
            hidden_bytes=drafting.hidden_bytes,
        )
