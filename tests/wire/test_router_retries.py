"""Further attempts: all requests together have a budget, and who has failed gets one at a time."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import Accepted, Generate
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, accepting, saying
from tests.front import front, ids

TEXT = "the quick brown fox"


async def dying(decoder: FakeDecoder, generate: Generate) -> None:
    """What a prompt does that breaks whoever runs it."""
    await decoder.reply_to.reply(Accepted(generate.attempt))
    await decoder.emit(generate, 0, [], error="decode step: it broke")


async def test_a_prompt_that_kills_does_not_take_down_one_after_another(nats: Broker) -> None:
    async with front(nats, retry_ratio=0.0, retry_floor=3) as router:
        await router.mesh.prefiller()
        decoders = [await router.mesh.decoder(dying, f"d{i}") for i in range(4)]
        await router.until_ready(5)
        answers = [await router.answer() for _ in range(5)]
        for status, body, headers in answers:
            assert (status, "it broke" in body["error"]["message"]) == (503, True)
            assert "Retry-After" in headers
        assert sum(len(decoder.generates) for decoder in decoders) == 5 + 3, "a first attempt each, and the floor"
        assert router.metric("kvmesh_retries_total", outcome="made") == 3
        assert router.metric("kvmesh_retries_total", outcome="refused") == 4


async def test_good_requests_bring_retries_with_them(nats: Broker) -> None:
    async with front(nats, retry_ratio=0.2, retry_floor=0) as router:
        await router.mesh.prefiller()
        decoder = await router.mesh.decoder(saying(*ids(TEXT)))
        await router.until_ready(2)
        for _ in range(9):
            assert (await router.answer())[0] == 200
        decoder.script = dying
        assert (await router.answer())[0] == 503
        assert len(decoder.generates) == 9 + 3


@pytest.mark.case("L2")
async def test_one_that_was_taken_for_dead_is_told_to_end_what_it_still_runs(nats: Broker) -> None:
    async with front(nats, max_attempts=1) as router:
        await router.mesh.prefiller()
        decoder = await router.mesh.decoder(accepting)
        await router.until_ready(2)
        asked = asyncio.ensure_future(router.answer())
        await decoder.until(lambda: len(decoder.generates) == 1)
        router.mesh.alive.remove(decoder)
        assert (await asked)[0] == 503
        (generate,) = decoder.generates
        assert not decoder.cancelled(generate), "nobody is there to hear it"
        router.mesh.alive.append(decoder)
        await decoder.status(generate.router, {generate.attempt: 0})
        await decoder.until(lambda: decoder.cancelled(generate))


@pytest.mark.parametrize("how", ["it failed an attempt", "it was silent", "it was restarted"])
async def test_who_has_failed_comes_back_half_open(nats: Broker, how: str) -> None:
    async with front(nats, max_attempts=1, absence_s=2.0) as router:
        await router.mesh.prefiller()
        decoder = await router.mesh.decoder(dying)
        await router.until_ready(2)
        if how == "it failed an attempt":
            assert (await router.answer())[0] == 503
        elif how == "it was silent":
            router.mesh.alive.remove(decoder)
            await router.until(lambda: len(router.service.registry.decoders) == 0)
            router.mesh.alive.append(decoder)
            await router.until(lambda: len(router.service.registry.decoders) == 1)
        else:
            router.mesh.alive.remove(decoder)
            decoder = await router.mesh.decoder(accepting)
            await router.until(lambda: router.service.registry.decoders[0].ref == decoder.ref)
        before = len(decoder.generates)
        decoder.script = accepting
        assert router.metric("kvmesh_half_open_instances") == 1
        asked = [asyncio.ensure_future(router.answer()) for _ in range(3)]
        await decoder.until(lambda: len(decoder.generates) == before + 1)
        await router.until(lambda: len(router.service.relay.line) == 2)
        assert len(decoder.generates) == before + 1, "one at a time"
        probe = decoder.generates[-1]
        decoder.script = saying(*ids(TEXT))
        await decoder.emit(probe, 0, ids(TEXT), finish="stop")
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 3
        assert router.metric("kvmesh_half_open_instances") == 0
