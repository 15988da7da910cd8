"""Fake instances that speak the mesh's own messages over a real broker: what the router sees of a mesh, and nothing more.

A `FakeDecoder` does what its `script` says for each `Generate`; the default accepts and emits a fixed text token by token.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from shared import subjects
from shared.bus import Access, Bus, Message
from shared.layout import KvLayout
from shared.messages import (
    PROTOCOL,
    Accepted,
    Announce,
    CancelGenerate,
    Discover,
    Emit,
    EmitBatch,
    FabricEndpoint,
    Generate,
    InstanceRef,
    Load,
    ModelIdentity,
    RefusedReply,
    Reply,
    Role,
    State,
    StreamStatus,
    Timing,
    ToDecoder,
    Verify,
)
from tests.broker import Broker

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32")

Script = Callable[["FakeDecoder", Generate], Awaitable[Reply | None]]


def announcement(
    role: Role = "decode",
    name: str = "d0",
    incarnation: int = 1,
    *,
    state: State = "ready",
    digest: str = "d1",
    layout: KvLayout = LAYOUT,
    max_batch: int = 8,
    load: Load | None = None,
    tp: int = 1,
    dp: int = 1,
    protocol: int = PROTOCOL,
    verify: Verify = "no",
    drafter: str = "",
) -> Announce:
    return Announce(
        role=role,
        instance=InstanceRef(name, incarnation),
        state=state,
        model=ModelIdentity(name="tiny", digest=digest, vocab_size=400, max_positions=512),
        layout=layout,
        fabric=FabricEndpoint("fake", b""),
        max_batch=max_batch,
        load=load or Load(free_pages=1000, largest_free_pages=1000, total_pages=1000),
        http="http://127.0.0.1:1",
        tp=tp,
        dp=dp,
        protocol=protocol,
        verify=verify,
        drafter=drafter,
    )


class FakeInstance:
    """Announces itself when asked and whenever `announce` changes; no heartbeat of its own unless `beat` runs."""

    def __init__(self, bus: Bus, announce: Announce) -> None:
        self.bus = bus
        self.announcement = announce

    @property
    def ref(self) -> InstanceRef:
        return self.announcement.instance

    async def open(self) -> None:
        await self.bus.subscribe(subjects.DISCOVER, Discover, self._on_discover)
        await self.announce()

    async def announce(self, **changes: object) -> None:
        """Says what it is, with `changes`."""
        self.announcement = msgspec.structs.replace(self.announcement, **changes)
        await self.bus.publish(subjects.ANNOUNCE, self.announcement)

    async def _on_discover(self, _: Message[Discover]) -> None:
        await self.announce()


class FakeDecoder(FakeInstance):
    def __init__(self, bus: Bus, announce: Announce, script: Script) -> None:
        super().__init__(bus, announce)
        self.script = script
        self.generates: list[Generate] = []
        self.cancels: list[CancelGenerate] = []
        self.changed = asyncio.Condition()
        self.tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        await self.bus.subscribe(subjects.inbox("decode", self.ref), ToDecoder, self._on_message)
        await super().open()

    async def until(self, what: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Until `what()` holds, asked after every message."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(what)

    async def emit(self, generate: Generate, index: int, tokens: list[int], **fields: object) -> None:
        emit = Emit(attempt=generate.attempt, index=index, tokens=tokens, **fields)  # type: ignore[arg-type]
        await self.send(generate.router, EmitBatch(decoder=self.ref, router=generate.router, emits=[emit]))

    async def status(self, router: InstanceRef, emitted: dict[str, int]) -> None:
        status = StreamStatus(decoder=self.ref, router=router, emitted=emitted)
        await self.bus.request(subjects.inbox("router", router), status, Accepted, timeout_s=2.0)

    async def send(self, router: InstanceRef, message: msgspec.Struct) -> None:
        await self.bus.publish(subjects.inbox("router", router), message)

    async def _on_message(self, message: Message[ToDecoder]) -> None:
        body = message.body
        if isinstance(body, Generate):
            self.generates.append(body)
            task = asyncio.create_task(self._run(body, message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif isinstance(body, CancelGenerate):
            self.cancels.append(body)
        async with self.changed:
            self.changed.notify_all()

    async def _run(self, generate: Generate, message: Message[ToDecoder]) -> None:
        self.reply_to = message
        reply = await self.script(self, generate)
        if reply is not None:
            await message.reply(reply)

    def cancelled(self, generate: Generate) -> bool:
        return any(cancel.attempt == generate.attempt for cancel in self.cancels)


def saying(*tokens: int, finish: str | None = "stop") -> Script:
    """Accepts, then emits the tokens one by one, and the end with the last."""

    async def script(decoder: FakeDecoder, generate: Generate) -> None:
        await decoder.reply_to.reply(Accepted(generate.attempt))
        wanted = tokens[: generate.max_tokens]
        for i, token in enumerate(wanted):
            timing = Timing(admitted_to_ready_s=0.01, first_step_s=0.01, transferred_bytes=1024) if i == 0 else None
            await decoder.emit(generate, i, [token], timing=timing)
        if finish is not None:
            end = "length" if len(wanted) < len(tokens) else finish
            await decoder.emit(generate, len(wanted), [], finish=end)

    return script


def refusing(code: str, reason: str = "no", *, retryable: bool = True) -> Script:
    async def script(_: FakeDecoder, generate: Generate) -> Reply:
        return RefusedReply(attempt=generate.attempt, code=code, reason=reason, retryable=retryable)  # type: ignore[arg-type]

    return script


async def accepting(_: FakeDecoder, generate: Generate) -> Reply:
    """Accepts and says no more: the test emits."""
    return Accepted(generate.attempt)


async def silent(_: FakeDecoder, __: Generate) -> None:
    """Never answers."""


class FakeMesh:
    """Instances on a broker, each with a connection of its own, and heartbeats for all that are `alive`."""

    def __init__(self, broker: Broker, stack: AsyncExitStack) -> None:
        self._broker, self._stack = broker, stack
        self.alive: list[FakeInstance] = []
        self._buses: dict[InstanceRef, AsyncExitStack] = {}

    async def decoder(self, script: Script, name: str = "d0", **fields: object) -> FakeDecoder:
        announce = announcement("decode", name, secrets.randbits(64), **fields)  # type: ignore[arg-type]
        decoder = FakeDecoder(await self._connect(announce.instance), announce, script)
        await self._open(decoder)
        return decoder

    async def prefiller(self, name: str = "p0", **fields: object) -> FakeInstance:
        announce = announcement("prefill", name, secrets.randbits(64), **fields)  # type: ignore[arg-type]
        prefiller = FakeInstance(await self._connect(announce.instance), announce)
        await self._open(prefiller)
        return prefiller

    async def kill(self, instance: FakeInstance) -> None:
        """Its connection ends and its heartbeats stop: what the others see of kill -9."""
        self.alive.remove(instance)
        await self._buses.pop(instance.ref).aclose()

    async def beat(self, period_s: float = 0.1) -> None:
        """Heartbeats until cancelled; a broker that is away is waited for."""
        while True:
            for instance in list(self.alive):
                if instance.bus.connected:
                    await instance.announce()
            await asyncio.sleep(period_s)

    async def _open(self, instance: FakeInstance) -> None:
        await instance.open()
        await instance.bus.flush()
        self.alive.append(instance)

    async def _connect(self, ref: InstanceRef) -> Bus:
        stack = await self._stack.enter_async_context(AsyncExitStack())
        self._buses[ref] = stack
        connection = Bus.connect(Access(url=self._broker.url, token=self._broker.token), name=ref.name)
        return await stack.enter_async_context(connection)


@asynccontextmanager
async def fake_mesh(broker: Broker) -> AsyncIterator[FakeMesh]:
    async with AsyncExitStack() as stack:
        mesh = FakeMesh(broker, stack)
        beating = asyncio.create_task(mesh.beat())
        try:
            yield mesh
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
