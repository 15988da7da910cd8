"""A mesh in one process: real services, a real broker, the toy executor; the fabric is the test's choice. The router is a
stub that speaks its messages, so that a test sees every one of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics
from services.decode.service import DecodeService
from services.prefill.metrics import PrefillMetrics
from services.prefill.service import PrefillService
from services.up.broker import Broker
from shared import subjects
from shared.bus import Access, Bus, Message
from shared.config import DecodeSettings, InstanceSettings, PrefillSettings
from shared.engine.client import ExecutorConfig
from shared.engine.group import ExecutorGroup
from shared.engine.protocol import Drafter
from shared.instance import Announcer, Instance
from shared.kv.ledger import PagePool
from shared.layout import KvDtype, KvLayout
from shared.messages import (
    Accepted,
    Announce,
    CancelGenerate,
    Emit,
    EmitBatch,
    Generate,
    InstanceRef,
    ModelIdentity,
    Reply,
    Role,
    Sampling,
    StreamStatus,
    ToRouter,
)
from shared.models.config import load_config
from shared.opening import data_parallel
from shared.subjects import Service
from shared.transfer.interface import Fabric
from tests.toy_executor import ToyExecutor

LAYOUT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, page_size=4, dtype="float32")
MODEL = ModelIdentity(name="toy", digest="toy", vocab_size=97, max_positions=4096)
GREEDY = Sampling(temperature=0)

OpenFabric = Callable[[int], Any]
"""identity → an awaitable fabric."""


async def real_fabric(identity: int) -> Any:
    """libfabric's tcp on loopback."""
    from shared.transfer.fabric import Fabric

    return await Fabric.open(provider="tcp", host="127.0.0.1", identity=identity)


class Engine:
    """What the nodes of a mesh run: the toy model, in this process."""

    identity = MODEL
    directory = Path("no tokenizer")
    eos_token_ids: tuple[int, ...] = ()
    drafter: Drafter = "none"
    hidden_bytes = 0

    def __init__(self, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout

    async def executor(self, stack: AsyncExitStack, settings: InstanceSettings, pages: int) -> Any:
        """As `settings` split it, `pages` pages a data parallel rank."""
        executor = ToyExecutor(self.layout, pages, settings.tp, data_parallel(settings))
        stack.callback(executor.close)
        return executor


class ModelEngine(Engine):
    """A model in executor processes."""

    def __init__(
        self,
        directory: Path,
        *,
        page_size: int,
        kv_dtype: KvDtype = "float32",
        drafter: Drafter = "none",
        draft: Path | None = None,
    ) -> None:
        config = load_config(directory)
        mtp = drafter == "mtp"
        drafting = load_config(draft) if draft else None
        super().__init__(config.layout(page_size=page_size, dtype=kv_dtype, mtp=mtp, draft=drafting))
        self.drafter, self.draft = drafter, draft
        self.hidden_bytes = 4 * config.hidden if mtp else 0
        self.directory = directory
        self.eos_token_ids = tuple(config.eos_ids)
        self.identity = ModelIdentity(
            name="m", digest="m", vocab_size=config.vocab_size, max_positions=config.max_positions
        )

    async def executor(self, stack: AsyncExitStack, settings: InstanceSettings, pages: int) -> Any:
        purpose: Role = "decode" if isinstance(settings, DecodeSettings) else "prefill"
        config = ExecutorConfig(
            model=str(self.directory),
            layout=self.layout,
            num_pages=pages,
            purpose=purpose,
            drafter=self.drafter,
            draft_model=str(self.draft or ""),
        )
        group = ExecutorGroup.start(config, settings.tp, data_parallel(settings))
        return await stack.enter_async_context(group)


class Node:
    """One service with what it stands on. `stop` ends it as a kill would: nothing is said to anybody."""

    def __init__(
        self, instance: Instance, service: Any, announcer: Announcer, executor: ToyExecutor, task: Any
    ) -> None:
        self.instance = instance
        self.service = service
        self.announcer = announcer
        self.executor = executor
        self.task = task

    @property
    def announce(self) -> Announce:
        return self.announcer.announce()

    async def until_idle(self) -> None:
        """Until every page is free; the ledgers are checked at every turn."""
        pools = self.instance.pools
        async with asyncio.timeout(10):
            while any(pool.free != pool.num_pages for pool in pools) or not self.service.idle.is_set():
                self.service.check_integrity()
                await asyncio.sleep(0.005)
        self.service.check_integrity()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class StubRouter:
    """Sends `Generate`, collects `Emit`s."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.me = InstanceRef("router", secrets.randbits(64))
        self.emits: dict[str, list[Emit]] = {}
        self.statuses: list[StreamStatus] = []
        self._changed = asyncio.Condition()
        self.answers_statuses = True

    async def listen(self) -> None:
        await self.bus.subscribe(subjects.inbox("router", self.me), ToRouter, self._on_message)

    async def _on_message(self, message: Message[ToRouter]) -> None:
        async with self._changed:
            match message.body:
                case EmitBatch(emits=emits):
                    for emit in emits:
                        self.emits.setdefault(emit.attempt, []).append(emit)
                case StreamStatus():
                    self.statuses.append(message.body)
                    await message.reply(Accepted(""))
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(condition)

    def generate(self, decoder: Node, prefiller: Announce | None, tokens: list[int], **changes: Any) -> Generate:
        fields: dict[str, Any] = {
            "attempt": secrets.token_hex(16),
            "router": self.me,
            "decoder": decoder.instance.ref,
            "prefiller": prefiller,
            "tokens": tokens,
            "sampling": GREEDY,
            "max_tokens": 6,
            "stop_token_ids": [],
            "budget_s": 10.0,
        }
        return Generate(**{**fields, **changes})

    async def send(self, generate: Generate) -> Reply:
        subject = subjects.inbox("decode", generate.decoder)
        answer: Reply = await self.bus.request(subject, generate, Reply, timeout_s=2)
        return answer

    async def start(self, generate: Generate) -> None:
        answer = await self.send(generate)
        assert isinstance(answer, Accepted), answer

    async def cancel(self, generate: Generate) -> None:
        cancel = CancelGenerate(attempt=generate.attempt, decoder=generate.decoder, reason="the client left")
        await self.bus.publish(subjects.inbox("decode", generate.decoder), cancel)

    def ended(self, attempt: str) -> bool:
        return any(emit.finish or emit.error for emit in self.emits.get(attempt, []))

    async def result(self, generate: Generate) -> list[int]:
        """All its tokens, checked for gaps; raises `AssertionError` with the error where it failed."""
        await self.until(lambda: self.ended(generate.attempt))
        emits = self.emits[generate.attempt]
        assert emits[-1].error is None, emits[-1].error
        tokens: list[int] = []
        for emit in emits:
            assert emit.index == len(tokens), "a gap or a repeat"
            tokens += emit.tokens
        return tokens

    async def run(self, decoder: Node, prefiller: Announce | None, tokens: list[int], **changes: Any) -> list[int]:
        generate = self.generate(decoder, prefiller, tokens, **changes)
        await self.start(generate)
        return await self.result(generate)


class Mesh:
    """Starts nodes; ends them all."""

    def __init__(self, stack: AsyncExitStack, broker: Broker, open_fabric: OpenFabric, engine: Engine) -> None:
        self.stack = stack
        self.broker = broker
        self._open_fabric = open_fabric
        self._engine = engine

    async def bus(self, role: Service, name: str) -> Bus:
        """A connection with the role's rights."""
        told = self.broker.told(role)
        user, password = told["KVMESH_NATS_USER"], told["KVMESH_NATS_PASSWORD"]
        access = Access(url=told["KVMESH_NATS_URL"], user=user, password=password)
        return await self.stack.enter_async_context(Bus.connect(access, name=name))

    async def router(self) -> StubRouter:
        router = StubRouter(await self.bus("router", "router"))
        await router.listen()
        return router

    async def prefiller(self, name: str = "prefill", *, pages: int = 32, **settings: Any) -> Node:
        chosen = PrefillSettings(**{"name": name, "chunk_tokens": 8, **settings})
        return await self._start("prefill", chosen, pages, PrefillService, PrefillMetrics)

    async def decoder(self, name: str = "decode", *, pages: int = 32, **settings: Any) -> Node:
        chosen = DecodeSettings(**{"name": name, "max_batch": 8, "quarantine_s": 1.0, **settings})
        return await self._start("decode", chosen, pages, DecodeService, DecodeMetrics)

    async def _start(self, role: Role, settings: InstanceSettings, pages: int, make: Any, metrics: Any) -> Node:
        ref = InstanceRef(settings.name, secrets.randbits(64))
        executor = await self._engine.executor(self.stack, settings, pages)
        fabric: Fabric = await self._open_fabric(ref.incarnation)
        self.stack.push_async_callback(fabric.close)
        regions = [fabric.register(fd, executor.kv_bytes) for fd in executor.kv_fds]
        instance = Instance(
            role,
            ref,
            settings,
            self._engine.identity,
            self._engine.layout,
            [PagePool(pages) for _ in range(executor.dp)],
            executor,
            fabric,
            regions,
            await self.bus(role, settings.name),
            self._engine.directory,
            self._engine.eos_token_ids,
            drafter="" if self._engine.drafter == "none" else self._engine.drafter,
            hidden_bytes=self._engine.hidden_bytes,
        )
        started: asyncio.Future[tuple[Any, Announcer]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_serve(instance, settings, make, metrics(CollectorRegistry()), started))
        self.stack.push_async_callback(_end, task)
        service, announcer = await started
        await instance.bus.flush()
        return Node(instance, service, announcer, executor, task)


async def _serve(instance: Instance, settings: Any, make: Any, metrics: Any, started: asyncio.Future[Any]) -> None:
    async with asyncio.TaskGroup() as tasks:
        service = make(instance, settings, metrics, tasks)
        announcer = Announcer(instance, service.load, max_batch=8, http="")
        listening = asyncio.Event()
        tasks.create_task(service.run(listening))
        tasks.create_task(announcer.run())
        await listening.wait()
        started.set_result((service, announcer))


async def _end(task: asyncio.Task[None]) -> None:
    """Raises what the service itself had ended with."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def mesh(open_fabric: OpenFabric, engine: Engine | None = None) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        broker = Broker()
        stack.push_async_callback(broker.close)
        await broker.start()
        yield Mesh(stack, broker, open_fabric, engine or Engine())
