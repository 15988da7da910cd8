"""A peer that lies in its messages: the instance goes on, says so, loses nothing, and writes where it was allowed to alone.

The liar's messages come over the real broker; the fabric is the real one, on loopback.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import subjects
from shared.bus import Bus, Message
from shared.errors import BusError
from shared.messages import (
    Accepted,
    CancelGenerate,
    CancelPrefill,
    Drained,
    FabricEndpoint,
    InstanceRef,
    Prefill,
    RefusedReply,
    Reply,
    TailSlot,
    ToDecoder,
)
from tests.inproc import LAYOUT, Mesh, Node, StubRouter, mesh, real_fabric
from tests.mutation import encoded
from tests.toy_executor import toy_output

PAGES = 16
PROMPT = [5, 4, 3, 2, 1, 6, 7, 8, 9, 10]
MANY = settings(max_examples=200, deadline=None, database=None, suppress_health_check=[*HealthCheck])


@pytest.fixture
def runner(caplog: pytest.LogCaptureFixture) -> Iterator[asyncio.Runner]:
    """What runs in it leaves no traceback in the log: a lie is an answer, not an accident."""
    with asyncio.Runner() as made:
        yield made
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


class Lies:
    """A mesh with a prefiller and a decoder that are honest, and a connection for one that is not."""

    mesh: Mesh
    router: StubRouter
    prefill: Node
    decode: Node
    bus: Bus
    taken = 0

    async def throw(self, node: Node, said: bytes) -> None:
        """Sends it, and waits until it was taken in; `taken` counts what got past the door."""
        bus, role = node.instance.bus, node.instance.role
        before = bus.malformed + bus.failed
        await self.bus._client.publish(subjects.inbox(role, node.instance.ref), said)
        await self.bus.flush()
        await bus.flush()
        await asyncio.sleep(0)
        self.taken += bus.malformed + bus.failed == before

    async def works(self) -> None:
        """Everything is as before: idle, nothing lost, and a prompt gets its answer."""
        assert not self.prefill.task.done()
        assert not self.decode.task.done()
        await self.prefill.until_idle()
        await self.decode.until_idle()
        assert await self.router.run(self.decode, self.prefill.announce, PROMPT) == toy_output(PROMPT, 6)
        await self.prefill.until_idle()
        await self.decode.until_idle()


@asynccontextmanager
async def lies(role: Any) -> AsyncIterator[Lies]:
    async with mesh(real_fabric) as whole:
        made = Lies()
        made.mesh, made.router = whole, await whole.router()
        made.prefill, made.decode = await whole.prefiller(), await whole.decoder()
        made.bus = await whole.bus(role, "liar")
        yield made


class LyingDecoder:
    """A decoder's fabric and memory, and nothing of its service."""

    def __init__(self, lies: Lies, fabric: Any) -> None:
        self.lies, self.fabric = lies, fabric
        self.ref = InstanceRef("liar", fabric_identity(fabric))
        self.drained: dict[str, asyncio.Event] = {}
        size = LAYOUT.region_bytes(PAGES)
        self.memory, self.region = mapped(fabric, size)
        self.tails, self.tail_region = mapped(fabric, 4096)

    async def listen(self) -> None:
        await self.lies.bus.subscribe(subjects.inbox("decode", self.ref), ToDecoder, self._on_message)

    async def _on_message(self, message: Message[Any]) -> None:
        if isinstance(message.body, Drained):
            self.drained.setdefault(message.body.attempt, asyncio.Event()).set()

    def prefill(self, **changes: Any) -> Prefill:
        fields: dict[str, Any] = {
            "attempt": secrets.token_hex(16),
            "prefiller": self.lies.prefill.instance.ref,
            "decoder": self.ref,
            "fabric": FabricEndpoint("tcp", self.fabric.address),
            "layout": LAYOUT,
            "num_pages": PAGES,
            "regions": [self.region.descriptor],
            "pages": [3, 9, 4],
            "immediate": 7,
            "tail": TailSlot(self.tail_region.descriptor, 256),
            "tokens": PROMPT,
            "budget_s": 0.3,
        }
        return Prefill(**{**fields, **changes})

    async def ask(self, prefill: Prefill) -> Reply:
        subject = subjects.inbox("prefill", self.lies.prefill.instance.ref)
        answer: Reply = await self.lies.bus.request(subject, prefill, Reply, timeout_s=2)
        return answer

    def touched(self) -> set[int]:
        """Pages in which anything is; then they are cleared."""
        found = set()
        for layer in range(LAYOUT.num_layers):
            for page in range(PAGES):
                at = LAYOUT.offset(layer, page, PAGES)
                if any(self.memory[at : at + LAYOUT.page_bytes]):
                    found.add(page)
        self.memory[:] = bytes(len(self.memory))
        return found


def fabric_identity(fabric: Any) -> int:
    from shared.transfer import _native

    return _native.address_identity(fabric.address)


def mapped(fabric: Any, length: int) -> tuple[mmap.mmap, Any]:
    fd = os.memfd_create("kvmesh-test")
    os.ftruncate(fd, length)
    made = mmap.mmap(fd, length), fabric.register(fd, length)
    os.close(fd)
    return made


@asynccontextmanager
async def lying_decoder() -> AsyncIterator[LyingDecoder]:
    async with lies("decode") as made:
        fabric = await real_fabric(secrets.randbits(63) + 1)
        try:
            liar = LyingDecoder(made, fabric)
            await liar.listen()
            yield liar
        finally:
            await fabric.close()


def fuzz(
    runner: asyncio.Runner,
    opened: Any,
    strategy: Callable[[Any], st.SearchStrategy[Any]],
    one: Callable[..., Awaitable[None]],
) -> None:
    """Opens a mesh, throws examples at it one after another, and looks at the end whether it works."""
    stack = AsyncExitStack()
    liar = runner.run(stack.enter_async_context(opened))

    whole = liar.lies if isinstance(liar, LyingDecoder) else liar

    @MANY
    @given(strategy(liar))
    def throw(example: Any) -> None:
        runner.run(_awaited(one(liar, example)))

    try:
        throw()
        runner.run(whole.works())
        malformed = sum(node.instance.bus.malformed for node in (whole.prefill, whole.decode))
        assert min(whole.taken, malformed) > 10, "too many are taken, or too few: the test throws badly"
    finally:
        runner.run(stack.aclose())


async def _awaited(made: Awaitable[None]) -> None:
    await made


def test_a_decoder_that_says_anything_to_a_prefiller(runner: asyncio.Runner) -> None:
    async def one(liar: LyingDecoder, said: bytes) -> None:
        prefill = liar.lies.prefill
        await liar.lies.throw(prefill, said)
        await prefill.until_idle()
        assert not prefill.task.done()

    def strategy(liar: LyingDecoder) -> st.SearchStrategy[bytes]:
        cancel = CancelPrefill(attempt="00" * 16, prefiller=liar.ref, decoder=liar.ref, reason="")
        return encoded(liar.prefill()) | encoded(liar.prefill(tokens=[1, 2], pages=[5])) | encoded(cancel)

    fuzz(runner, lying_decoder(), strategy, one)


def test_anybody_who_says_anything_to_a_decoder(runner: asyncio.Runner) -> None:
    async def one(liar: Lies, said: bytes) -> None:
        decode = liar.decode
        honest = liar.router.generate(decode, liar.prefill.announce, PROMPT, max_tokens=2)
        await liar.router.start(honest)
        await liar.throw(decode, said)
        assert await liar.router.result(honest) == toy_output(PROMPT, 2)
        await decode.until_idle()
        assert not decode.task.done()

    def strategy(liar: Lies) -> st.SearchStrategy[bytes]:
        me, prefiller = liar.decode.instance.ref, liar.prefill.instance.ref
        told = liar.router.generate(liar.decode, liar.prefill.announce, PROMPT, max_tokens=3, budget_s=0.5)
        cancel = CancelGenerate(attempt="00" * 16, decoder=me, reason="")
        drained = Drained(attempt="00" * 16, decoder=me, prefiller=prefiller)
        return encoded(told) | encoded(told) | encoded(cancel) | encoded(drained)

    fuzz(runner, lies("router"), strategy, one)


async def test_a_prefiller_writes_to_the_listed_pages_alone() -> None:
    async with lying_decoder() as liar:
        prefill = liar.prefill()
        assert isinstance(await liar.ask(prefill), Accepted)
        await liar.lies.prefill.until_idle()
        assert liar.touched() == {3, 9, 4}
        assert any(liar.tails[256:512])
        assert not any(liar.tails[:256] + liar.tails[512:])


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        ({"pages": [3, 9, 3]}, "invalid"),
        ({"pages": [3, 9, PAGES]}, "invalid"),
        ({"pages": [3, 9]}, "invalid"),
        ({"tokens": [97, *PROMPT[1:]]}, "invalid"),
        ({"tokens": []}, "invalid"),
        ({"prefiller": InstanceRef("prefill", 1)}, "stale_incarnation"),
        ({"layout": msgspec.structs.replace(LAYOUT, page_size=8)}, "mismatch"),
    ],
)
async def test_a_prefill_that_does_not_fit_is_refused_by_name(lie: dict[str, Any], code: str) -> None:
    async with lying_decoder() as liar:
        answer = await liar.ask(liar.prefill(**lie))
        assert isinstance(answer, RefusedReply)
        assert answer.code == code
        assert liar.lies.prefill.service.load().running == 0
        await liar.lies.works()


@pytest.mark.parametrize(
    "lie",
    [
        {"pages": [-1, 9, 3]},
        {"pages": [2**32, 9, 3]},
        {"immediate": 2**32},
        {"immediate": -1},
        {"num_pages": 2**60},
        {"regions": []},
        {"regions": [b""] * 2000},
        {"attempt": "no hex"},
        {"attempt": "00"},
        {"budget_s": float("nan")},
        {"budget_s": float("inf")},
        {"tail": TailSlot(b"", -1)},
        {"decoder": InstanceRef("a.b\r\n", 1)},
        {"layout": msgspec.structs.replace(LAYOUT, page_size=0)},
    ],
    ids=lambda lie: "-".join(lie),
)
async def test_what_is_no_message_is_dropped_and_counted(lie: dict[str, Any]) -> None:
    async with lying_decoder() as liar:
        bus = liar.lies.prefill.instance.bus
        subject = subjects.inbox("prefill", liar.lies.prefill.instance.ref)
        with pytest.raises(BusError, match="no answer"):
            await liar.lies.bus.request(subject, liar.prefill(**lie), Reply, timeout_s=0.1)
        assert (bus.malformed, bus.failed) == (1, 0)
        await liar.lies.works()


@pytest.mark.parametrize(
    "lie",
    [
        {"regions": [b"nonsense"]},
        {"num_pages": 2**31},
        {"tail": TailSlot(b"nonsense", 0)},
        {"fabric": FabricEndpoint("tcp", b"nonsense")},
        {"fabric": FabricEndpoint("tcp", b"KVA\x02" + bytes(16) + b"\1\0\1\0\4\0\xff\xfe\0.\3\0tcp")},
        {"fabric": FabricEndpoint("tcp", b"KVA\x02" + b"\1" * 16 + b"\1\0\1\0\x50\0" + b"x" * 80 + b"\3\0tcp")},
    ],
    ids=["descriptor", "num_pages", "tail", "address", "host", "label"],
)
async def test_lies_that_only_the_fabric_sees_fail_their_attempt_alone(
    lie: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with lying_decoder() as liar:
        prefill = liar.prefill(**lie)
        told = liar.drained.setdefault(prefill.attempt, asyncio.Event())
        assert isinstance(await liar.ask(prefill), Accepted)
        async with asyncio.timeout(3):
            await told.wait()
        assert not any(liar.memory[:]) or "tail" in lie
        await liar.lies.works()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_cancel_from_another_decoder_is_nothing() -> None:
    async with lying_decoder() as liar:
        whole, prefill = liar.lies, liar.lies.prefill
        prefill.executor.gate.clear()
        honest = whole.router.generate(whole.decode, prefill.announce, PROMPT)
        await whole.router.start(honest)
        await prefill.executor.entered.wait()
        cancel = CancelPrefill(attempt=honest.attempt, prefiller=prefill.instance.ref, decoder=liar.ref, reason="")
        await whole.bus.request(subjects.inbox("prefill", prefill.instance.ref), cancel, Drained, timeout_s=2)
        prefill.executor.gate.set()
        assert await whole.router.result(honest) == toy_output(PROMPT, 6)
        await whole.works()


async def test_anothers_word_that_all_has_drained_frees_nothing() -> None:
    async with lies("prefill") as liar:
        decode, prefill = liar.decode, liar.prefill
        prefill.executor.gate.clear()
        honest = liar.router.generate(decode, prefill.announce, PROMPT)
        await liar.router.start(honest)
        await prefill.executor.entered.wait()
        drained = Drained(
            attempt=honest.attempt, decoder=decode.instance.ref, prefiller=InstanceRef("liar", 3), error="x"
        )
        await liar.bus.publish(subjects.inbox("decode", decode.instance.ref), drained)
        await liar.bus.flush()
        await decode.instance.bus.flush()
        prefill.executor.gate.set()
        assert await liar.router.result(honest) == toy_output(PROMPT, 6)
        await liar.works()


async def test_a_replayed_prefill_writes_nothing() -> None:
    """Somebody kept an honest decoder's message and sends it again when its attempt is over: the descriptors have ended."""
    async with lies("decode") as liar:
        spy, kept = await liar.mesh.bus("prefill", "spy"), []
        subject = subjects.inbox("prefill", liar.prefill.instance.ref)

        async def keep(message: Message[Any]) -> None:
            kept.append(message.body)

        await spy.subscribe(subject, Prefill | CancelPrefill, keep)
        await liar.works()
        pattern = bytes(range(256)) * (len(liar.decode.executor.kv[0]) // 256)
        liar.decode.executor.kv[0][:] = pattern
        with suppress(BusError):
            assert isinstance(await liar.bus.request(subject, kept[0], Reply, timeout_s=2), Accepted)
        await liar.prefill.until_idle()
        assert liar.decode.executor.kv[0][:] == pattern
        await liar.works()
