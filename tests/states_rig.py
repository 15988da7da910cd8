"""A mesh in one process that stops where a test wants it: a real router with an HTTP client, a toy prefiller and a toy decoder
whose inboxes, steps and writes can be held, over a fabric that looks at every page before a write lands on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from services.decode.metrics import DecodeMetrics
from services.decode.service import DecodeService
from services.prefill.metrics import PrefillMetrics
from services.prefill.service import PrefillService
from services.router.main import running
from shared import subjects
from shared.config import DecodeSettings, PrefillSettings, RouterSettings
from shared.errors import PeerLost, TransferCancelled
from shared.messages import CancelGenerate, CancelPrefill, Drained, Emit, EmitBatch
from shared.transfer.interface import PagedWrite
from tests.fake_fabric import FakeTransfer
from tests.inproc import Engine, Mesh, Node, mesh
from tests.landing_fabric import LandingFabric
from tests.tiny_model import byte_level, served_model
from tests.toy_executor import toy_output

PROMPT = [7 + (5 * i) % 80 for i in range(20)]
MARK = 99
"""A token of the blocker's prompt and of no other."""
BLOCKER = [MARK + i for i in range(33)]
"""Four chunks of its own."""
EXPECTED = byte_level().decode(toy_output(PROMPT, 6), skip_special_tokens=True)
DEAD_AFTER_S = 0.8


class PostedTransfer(FakeTransfer):
    """Posted to the NIC: a cancel is over only when its writes have landed."""

    cancelled = False

    def cancel(self) -> None:
        if self.writes:
            self.cancelled = True
        elif not self.future.done():
            super().cancel()

    def land_data(self) -> None:
        """Writes land, and the sender does not know yet."""
        while self.writes:
            self.writes.pop(0)()

    def land(self) -> None:
        self.land_data()
        if self.cancelled:
            self.fail(TransferCancelled("cancelled"))
        super().land()


class WatchedFabric(LandingFabric):
    """`look` is called with each write of pages as it lands."""

    look: Callable[[PagedWrite], None] = staticmethod(lambda _: None)

    def write_pages(self, write: PagedWrite) -> FakeTransfer:
        transfer = super().write_pages(write)
        transfer.writes = [self._watched(write, land) for land in transfer.writes]
        return transfer

    def _watched(self, write: PagedWrite, land: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            self.look(write)
            land()

        return both


class HeldDecode(DecodeService):
    inbox: asyncio.Event

    async def _on_message(self, message: Any) -> None:
        await self.inbox.wait()
        await super()._on_message(message)


class HeldPrefill(PrefillService):
    inbox: asyncio.Event

    async def _on_message(self, message: Any) -> None:
        await self.inbox.wait()
        await super()._on_message(message)


class ServedEngine(Engine):
    identity = served_model().identity


class Answer:
    """What the client has."""

    def __init__(self) -> None:
        self.status = 0
        self.text = ""
        self.began = asyncio.Event()

    @property
    def failed(self) -> bool:
        """The stream began, and ended with an error."""
        return self.status == 200 and "event: error" in self.text and "[DONE]" not in self.text

    @property
    def whole(self) -> bool:
        return self.status == 200 and "event: error" not in self.text and self.text.endswith("data: [DONE]\n\n")


class Rig:
    def __init__(self, whole: Mesh, prefill: Node, decode: Node, service: Any, url: str, session: Any) -> None:
        self.whole, self.prefill, self.decode = whole, prefill, decode
        self.router, self.url, self.session = service, url, session
        self.violations: list[str] = []
        self.lost: set[str] = set()
        self.stub: Any = None
        self.blocker: Any = None
        self.answer = Answer()
        self.client: asyncio.Task[None] | None = None
        self.prefill.instance.fabric.look = self._look

    # ---- the request

    def ask(self) -> None:
        self.client = asyncio.create_task(self._ask(self.answer))

    async def _ask(self, answer: Answer) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        async with self.session.post(self.url + "/v1/completions", json={**body, "stream": True}) as response:
            answer.status = response.status
            async for part in response.content.iter_any():
                answer.text += part.decode()
                answer.began.set()

    async def another(self) -> Answer:
        answer = Answer()
        async with asyncio.timeout(5):
            await self._ask(answer)
        return answer

    @property
    def attempts(self) -> list[Any]:
        return list(self.router.relay.table)

    @property
    def pool(self) -> Any:
        return self.decode.instance.pools[0]

    def at_prefiller(self, attempt: str) -> Any:
        return self.prefill.service._running.get(attempt)

    def told(self, attempt: str) -> bool:
        """Both sides know that it is over, or have done what there was to do."""
        at_decoder = "decode" not in self.lost and self.decode.service._attempts.get(attempt) is not None
        job = None if "prefill" in self.lost else self.at_prefiller(attempt)
        return not at_decoder and (job is None or job.has_failed or job.computed.is_set())

    # ---- gates

    def hold_writes(self) -> None:
        """From now on they are posted, and land when `land` says so."""
        fabric = self.prefill.instance.fabric
        fabric.hold, fabric.make_transfer = True, PostedTransfer

    def land(self) -> None:
        fabric = self.prefill.instance.fabric
        if not fabric.hold:
            return
        fabric.hold, fabric.make_transfer = False, FakeTransfer
        for transfer in fabric.transfers:
            transfer.land()

    def open_inboxes(self) -> None:
        self.decode.service.inbox.set()
        self.prefill.service.inbox.set()

    async def open_all(self) -> None:
        self.open_inboxes()
        for node in (self.prefill, self.decode):
            node.executor.close_at = None
            node.executor.gate.set()
        self.land()
        await self.set_room(True)

    async def set_room(self, room: bool) -> None:
        """Whether the decoder has pages for anybody."""
        if "decode" in self.lost:
            return
        if room:
            self.pool.release("elsewhere")
        else:
            self.pool.reserve("elsewhere", self.pool.free)
        await self.decode.announcer.publish()

    async def block_prefiller(self) -> None:
        """Another prompt is being computed, and stays at it."""
        self.prefill.executor.gate.clear()
        self.stub = await self.whole.router()
        self.blocker = self.stub.generate(self.decode, self.prefill.announce, BLOCKER)
        await self.stub.start(self.blocker)
        await self.prefill.executor.entered.wait()

    # ---- losses

    async def lose(self, node: Node, other: Node) -> None:
        """As kill -9 does: its connections end, and the other side's fabric says so."""
        self.lost.add(node.instance.role)
        await node.instance.bus._client.close()
        gone = PeerLost("end of file", peer=node.instance.ref.incarnation)
        for transfer in self.prefill.instance.fabric.transfers:
            transfer.fail(gone)
        for callback in other.instance.fabric.callbacks:
            callback(node.instance.ref.incarnation, gone)
        await node.stop()

    # ---- what must hold

    def _look(self, write: PagedWrite) -> None:
        receiver = self.decode.service._receiver
        owner = next((i for i in receiver._incoming.values() if i.slot.immediate == write.immediate), None)
        if owner is None:
            self.violations.append("a write landed for an attempt that is not here")
        elif not set(write.target_pages) <= set(owner.pool.pages(owner.attempt)):
            self.violations.append("a write landed on a page that is not its attempt's any more")
        elif not set(write.source_pages) <= set(self.prefill.instance.pools[0].pages(owner.attempt)):
            self.violations.append("a write took from a page that is not its attempt's any more")

    async def until(self, what: Callable[[], bool], within_s: float = 5.0) -> None:
        """For what no event tells of."""
        async with asyncio.timeout(within_s):
            while not what():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        for node in (self.prefill, self.decode):
            if node.instance.role not in self.lost:
                await node.until_idle()
        relay = self.router.relay
        await self.until(lambda: not len(relay.table) and not len(relay.line))
        if "decode" not in self.lost:
            await self.until(lambda: not len(relay.courier))
            slots = self.decode.service._receiver._slots
            assert slots.free == slots.count
            armed = [arrival for arrival in self.decode.instance.fabric.arrivals.values() if not arrival.closed]
            assert armed == [], "a counter is still armed"
        if "prefill" not in self.lost:
            slots = self.prefill.service.sender._slots
            assert slots.free == slots.count
        for known in self.router.registry.instances:
            assert known.tally.attempts == 0
        assert self.violations == []

    async def late_words(self, attempt: str) -> None:
        """Everything that may still be said of an attempt that is over: ignored, and counted."""
        prefiller, decoder = self.prefill.instance.ref, self.decode.instance.ref
        late, there = self.decode.service._metrics.late, self.prefill.service._metrics.late
        before = [late.labels("cancel")._value.get(), late.labels("drained")._value.get(), there._value.get()]
        strays = self.router.relay.table.late
        bus = await self.whole.bus("router", "late")
        cancel = CancelGenerate(attempt=attempt, decoder=decoder, reason="late")
        await bus.publish(subjects.inbox("decode", decoder), cancel)
        drained = Drained(attempt=attempt, decoder=decoder, prefiller=prefiller)
        await self.prefill.instance.bus.publish(subjects.inbox("decode", decoder), drained)
        ask = CancelPrefill(attempt=attempt, prefiller=prefiller, decoder=decoder, reason="late")
        inbox = subjects.inbox("prefill", prefiller)
        answer = await self.decode.instance.bus.request(inbox, ask, Drained, timeout_s=1.0)
        assert answer.error is None
        emit = EmitBatch(decoder=decoder, router=self.router.me, emits=[Emit(attempt=attempt, index=0, tokens=[5])])
        await self.decode.instance.bus.publish(subjects.inbox("router", self.router.me), emit)
        await self.until(lambda: self.router.relay.table.late > strays)

        def counted() -> bool:
            after = [late.labels("cancel")._value.get(), late.labels("drained")._value.get(), there._value.get()]
            return all(new > old for new, old in zip(after, before, strict=True))

        await self.until(counted)


@asynccontextmanager
async def rig(**router_settings: Any) -> AsyncIterator[Rig]:
    network: dict[bytes, Any] = {}

    async def open_fabric(identity: int) -> WatchedFabric:
        return WatchedFabric(identity, network)

    async with mesh(open_fabric, ServedEngine()) as whole, aiohttp.ClientSession() as session:
        HeldDecode.inbox, HeldPrefill.inbox = asyncio.Event(), asyncio.Event()
        HeldDecode.inbox.set(), HeldPrefill.inbox.set()
        common = {"heartbeat_s": 0.1}
        prefill_settings = PrefillSettings(name="prefill", chunk_tokens=8, **common)
        decode_settings = DecodeSettings(name="decode", max_batch=8, quarantine_s=1.0, **common)
        prefill = await whole._start("prefill", prefill_settings, 32, HeldPrefill, PrefillMetrics)
        decode = await whole._start("decode", decode_settings, 32, HeldDecode, DecodeMetrics)
        told = whole.broker.told("router")
        settings = {
            "name": "router",
            "nats_url": told["KVMESH_NATS_URL"],
            "nats_user": told["KVMESH_NATS_USER"],
            "nats_password": told["KVMESH_NATS_PASSWORD"],
            "port": 0,
            "dead_after_s": DEAD_AFTER_S,
            "absence_s": 0.2,
            "max_attempts": 1,
        }
        async with running(RouterSettings(**{**settings, **router_settings}), served_model()) as (service, url):
            made = Rig(whole, prefill, decode, service, url, session)
            await made.until(lambda: service.readiness().reason is None)
            yield made
