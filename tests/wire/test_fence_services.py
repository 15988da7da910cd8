"""A prefiller that stands still with writes on their way, seen from the decoder's service: its attempt is fenced, the pages have
another use, and when it goes on not a byte changes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from shared import subjects
from shared.bus import Message
from shared.layout import KvLayout
from shared.messages import Accepted, CancelPrefill, Drained, InstanceRef, Prefill, ToPrefiller
from tests.inproc import Engine, Mesh, Node, StubRouter, mesh, real_fabric
from tests.toy_executor import toy_output
from tests.wire.fabric_rig import DEADLINE_S, OtherProcess, RemoteError, other_process

# Pages so large that the sockets are full long before a window's worth of them is sent.
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1024, page_size=64, dtype="float32")
PAGES = 16
PROMPT = [(7 * i) % 96 + 1 for i in range(100)]


class StandIn:
    """A prefiller whose service is the test and whose fabric is another process. It says that its writes have drained when
    `drains` is set, whether that is true or not."""

    def __init__(self, whole: Mesh, honest: Node, writer: OtherProcess, identity: int) -> None:
        self.ref = InstanceRef("standin", identity)
        self.announce = msgspec.structs.replace(honest.announce, instance=self.ref)
        self.writer = writer
        self.whole = whole
        self.drains = asyncio.Event()
        self.descriptor = b""
        self.writing: asyncio.Future[Any] | None = None

    async def listen(self) -> None:
        self.bus = await self.whole.bus("prefill", "standin")
        await self.bus.subscribe(subjects.inbox("prefill", self.ref), ToPrefiller, self._on_message)

    async def _on_message(self, message: Message[Any]) -> None:
        match message.body:
            case Prefill(attempt=attempt):
                await message.reply(Accepted(attempt))
                await self._write(message.body)
            case CancelPrefill(attempt=attempt, decoder=decoder) if self.drains.is_set():
                await message.reply(Drained(attempt=attempt, decoder=decoder, prefiller=self.ref))

    async def _write(self, prefill: Prefill) -> None:
        self.descriptor = prefill.regions[0]
        await self.writer.call("fill", byte=0xAA)
        await self.writer.call("connect", address=prefill.fabric.address.hex(), timeout_s=DEADLINE_S)
        self.writing = self.write(10_000)

    def write(self, repeat: int) -> asyncio.Future[Any]:
        """The whole region, `repeat` times over, under an immediate that nobody counts."""
        return self.writer.start(
            "write_pages",
            target=self.descriptor.hex(),
            pages=PAGES,
            page_bytes=LAYOUT.page_bytes,
            immediate=0xFFFF_FFFF,
            timeout_s=DEADLINE_S,
            repeat=repeat,
        )


@asynccontextmanager
async def standing_in(**settings: Any) -> AsyncIterator[tuple[StandIn, StubRouter, Node, Node]]:
    async with (
        other_process("tcp", length=PAGES * LAYOUT.page_bytes) as writer,
        mesh(real_fabric, Engine(LAYOUT)) as whole,
    ):
        router = await whole.router()
        honest = await whole.prefiller(pages=PAGES, chunk_tokens=64)
        decode = await whole.decoder(pages=PAGES, **settings)
        standin = StandIn(whole, honest, writer, int((await writer.call("about"))["identity"]))
        await standin.listen()
        yield standin, router, honest, decode


async def until_written(decode: Node) -> None:
    """Until writes land in the decoder's memory."""
    async with asyncio.timeout(DEADLINE_S):
        while decode.instance.fabric.stats().arrived < 20:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "silent"])
async def test_nothing_lands_after_the_fence_of_a_prefiller_that_stood_still(cancelled: bool) -> None:
    """`cancelled`: by the router, after which the stopped one does not say that it has drained. Else its silence ends it."""
    async with standing_in(quarantine_s=0.5) as (standin, router, honest, decode):
        generate = router.generate(decode, standin.announce, PROMPT)
        await router.start(generate)
        await until_written(decode)
        standin.writer.signal(signal.SIGSTOP)
        await standin.writer.stopped()
        started = time.monotonic()
        if cancelled:
            await router.cancel(generate)
        else:
            await router.until(lambda: router.ended(generate.attempt), within_s=2)
            assert f"peer {standin.ref.incarnation:016x}" in str(router.emits[generate.attempt][-1].error)
        await decode.until_idle()
        assert time.monotonic() - started < 2.5
        memory = decode.executor.kv[0]
        pattern = memory[:] = bytes(range(256)) * (len(memory) // 256)
        arrived = decode.instance.fabric.stats().arrived  # type: ignore[attr-defined]
        standin.writer.signal(signal.SIGCONT)
        assert standin.writing is not None
        with pytest.raises(RemoteError, match="PeerLost"):
            async with asyncio.timeout(DEADLINE_S):
                await standin.writing
        assert memory[:] == pattern
        assert decode.instance.fabric.stats().arrived == arrived  # type: ignore[attr-defined]
        memory[:] = bytes(len(memory))
        assert await router.run(decode, honest.announce, PROMPT) == toy_output(PROMPT, 6)
        await decode.until_idle()


async def test_one_who_says_that_it_has_drained_and_goes_on_is_refused() -> None:
    """No fence here, for the decoder was told that there is nothing to fence: the descriptors have ended with the attempt."""
    async with standing_in(quarantine_s=5.0) as (standin, router, honest, decode):
        standin.drains.set()
        generate = router.generate(decode, standin.announce, PROMPT)
        await router.start(generate)
        await until_written(decode)
        await router.cancel(generate)
        await decode.until_idle()
        assert standin.writing is not None
        with pytest.raises(RemoteError, match=r"RemoteAccessError|PeerLost"):
            async with asyncio.timeout(2):
                await standin.writing
        memory = decode.executor.kv[0]
        pattern = memory[:] = bytes(range(256)) * (len(memory) // 256)
        # It keeps the descriptor, and comes back over a new connection.
        await standin.writer.call("connect", address=decode.instance.fabric.address.hex(), timeout_s=DEADLINE_S)
        with pytest.raises(RemoteError, match=r"RemoteAccessError|PeerLost"):
            await standin.write(1)
        assert memory[:] == pattern
        memory[:] = bytes(len(memory))
        assert await router.run(decode, honest.announce, PROMPT) == toy_output(PROMPT, 6)
        await decode.until_idle()
