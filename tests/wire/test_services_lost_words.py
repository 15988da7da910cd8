"""Words between decoder and prefiller that are late, or lost: who is gone is known at once, who is only late is waited for."""

from __future__ import annotations

import asyncio

import msgspec

from shared import subjects
from shared.errors import BusError, MeshError
from shared.messages import InstanceRef, RefusedReply, ToPrefiller
from tests.wire.test_services_toy import small_mesh


async def test_after_the_broker_was_away_a_prefiller_may_be_later_to_come_back_than_the_decoder():
    async with small_mesh() as (_, router, prefill, decode):
        away = msgspec.structs.replace(prefill.announce, instance=InstanceRef("prefill", 1))
        decode.service._arrivals._note_broker_back()
        generate, cancelled = (router.generate(decode, away, [1, 2, 3, 4]) for _ in range(2))
        await router.start(generate)
        await router.start(cancelled)
        await asyncio.sleep(0.2)
        assert not router.ended(generate.attempt)
        await router.cancel(cancelled)
        async with asyncio.timeout(1):
            while len(decode.service._attempts) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        async def refuse(message):
            refusal = RefusedReply(attempt=message.body.attempt, code="busy", reason="it is back", retryable=True)
            await message.reply(refusal)

        bus = prefill.instance.bus
        await bus.subscribe(subjects.inbox("prefill", away.instance), ToPrefiller, refuse)
        await router.until(lambda: router.ended(generate.attempt), within_s=2)
        assert "prefill refused: it is back" in router.emits[generate.attempt][-1].error
        await decode.until_idle()


async def test_a_prefiller_that_is_gone_is_known_to_be_at_once():
    async with small_mesh() as (_, router, prefill, decode):
        gone = msgspec.structs.replace(prefill.announce, instance=InstanceRef("prefill", 1))
        generate = router.generate(decode, gone, [1, 2, 3, 4])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=1)
        assert "prefill is gone" in router.emits[generate.attempt][-1].error
        await decode.until_idle()


async def test_a_failure_whose_word_is_lost_is_told_again():
    """Else the decoder would wait for the KV until the request's deadline."""
    async with small_mesh() as (_, router, prefill, decode):
        bus = prefill.instance.bus
        honest, lost = bus.request, []

        async def losing(subject, body, *arguments, **named):
            if len(lost) < 2:
                lost.append(body)
                raise BusError("it went away with the broker")
            return await honest(subject, body, *arguments, **named)

        bus.request = losing
        prefill.executor.gate.clear()
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4])
        await router.start(generate)
        async with asyncio.timeout(3):
            while not (running := list(prefill.service._running.values())):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running[0].fail(MeshError("the prefill failed"))
        prefill.executor.gate.set()
        await router.until(lambda: router.ended(generate.attempt), within_s=3)
        assert "the prefill failed" in router.emits[generate.attempt][-1].error
        assert len(lost) == 2
        await decode.until_idle()
        await prefill.until_idle()
