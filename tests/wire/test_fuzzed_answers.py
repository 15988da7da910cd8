"""A prefiller that answers a decoder with anything: that attempt fails alone, and its pages come back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from shared import subjects
from shared.bus import Message
from shared.messages import Accepted, CancelPrefill, Drained, InstanceRef, Prefill, RefusedReply, ToPrefiller
from tests.inproc import mesh, real_fabric
from tests.mutation import encoded
from tests.toy_executor import toy_output

PROMPT = [5, 4, 3, 2, 1, 6, 7, 8, 9, 10]
PLACE = "00" * 16
ME = InstanceRef("liar", 9)
DECODER = InstanceRef("decode", 1)

ANSWERS = encoded(Accepted(PLACE)) | encoded(RefusedReply(attempt=PLACE, code="busy", reason="no", retryable=True))
CONFIRMATIONS = encoded(Drained(attempt=PLACE, decoder=DECODER, prefiller=ME))


@pytest.fixture
def runner(caplog: pytest.LogCaptureFixture) -> Iterator[asyncio.Runner]:
    """What runs in it leaves no traceback in the log: a lie is an answer, not an accident."""
    with asyncio.Runner() as made:
        yield made
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


def test_a_prefiller_that_answers_anything(runner: asyncio.Runner) -> None:
    stack = AsyncExitStack()
    said: dict[type, bytes] = {}
    errors: list[str] = []

    async def answer(message: Message[Any]) -> None:
        attempt = message.body.attempt.encode()
        await message._raw.respond(said[type(message.body)].replace(PLACE.encode(), attempt))

    async def start() -> tuple[Any, Any, Any]:
        whole = await stack.enter_async_context(mesh(real_fabric))
        router, honest = await whole.router(), await whole.prefiller()
        decode = await whole.decoder(quarantine_s=0.1)
        bus = await whole.bus("prefill", "liar")
        await bus.subscribe(subjects.inbox("prefill", ME), ToPrefiller, answer)
        return router, honest, decode

    router, honest, decode = runner.run(start())

    async def one(to_prefill: bytes, to_cancel: bytes) -> None:
        said[Prefill], said[CancelPrefill] = to_prefill, to_cancel
        announce = msgspec.structs.replace(honest.announce, instance=ME)
        lied = router.generate(decode, announce, PROMPT, budget_s=0.2)
        right = router.generate(decode, honest.announce, PROMPT, max_tokens=2)
        await asyncio.gather(router.start(lied), router.start(right))
        assert await router.result(right) == toy_output(PROMPT, 2)
        await router.until(lambda: router.ended(lied.attempt), within_s=2)
        errors.append(router.emits[lied.attempt][-1].error)
        await decode.until_idle()

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(ANSWERS, CONFIRMATIONS)
    def throw(to_prefill: bytes, to_cancel: bytes) -> None:
        runner.run(one(to_prefill, to_cancel))

    try:
        throw()
        assert all(errors)
        malformed = sum("malformed" in error for error in errors)
        assert malformed, "nothing is malformed: the test throws badly"
    finally:
        runner.run(stack.aclose())


@pytest.mark.parametrize(
    "who", [{"prefiller": InstanceRef("other", 1)}, {"attempt": "11" * 16}], ids=["prefiller", "attempt"]
)
async def test_a_confirmation_of_something_else_frees_no_page(who: dict[str, Any]) -> None:
    async with mesh(real_fabric) as whole:
        router, honest = await whole.router(), await whole.prefiller()
        decode = await whole.decoder(quarantine_s=0.6)
        bus = await whole.bus("prefill", "liar")
        asked = asyncio.Event()

        async def answer(message: Message[Any]) -> None:
            match message.body:
                case Prefill(attempt=attempt):
                    await message.reply(Accepted(attempt))
                case CancelPrefill(attempt=attempt, decoder=decoder):
                    right = Drained(attempt=attempt, decoder=decoder, prefiller=ME)
                    await message.reply(msgspec.structs.replace(right, **who))
                    asked.set()

        await bus.subscribe(subjects.inbox("prefill", ME), ToPrefiller, answer)
        announce = msgspec.structs.replace(honest.announce, instance=ME)
        lied = router.generate(decode, announce, PROMPT)
        await router.start(lied)
        await router.cancel(lied)
        await asked.wait()
        await decode.instance.bus.flush()
        (pool,) = decode.instance.pools
        assert pool.free < pool.num_pages, "they are in quarantine until the fence"
        await decode.until_idle()
