"""The broker dies, comes back, or stands still: streams go on or end with an error, nobody is counted as dead for it, and
new requests work within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.errors import BusError
from shared.messages import Generate
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, accepting, saying
from tests.front import DEAD_AFTER_S, Front, events, front, ids, text_of

TEXT = "the quick brown fox"


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.prefiller()
        yield made


async def streaming(router: Front, decoder: FakeDecoder) -> tuple[Generate, asyncio.Task[str]]:
    """A stream that has begun, and a task that reads it to its end."""
    opened = asyncio.Event()

    async def read() -> str:
        async with router.chat(stream=True) as response:
            opened.set()
            return await response.text()

    task = asyncio.create_task(read())
    await decoder.until(lambda: bool(decoder.generates))
    await decoder.emit(decoder.generates[-1], 0, ids(TEXT)[:2])
    async with asyncio.timeout(5.0):
        await opened.wait()
    return decoder.generates[-1], task


async def all_back(router: Front) -> None:
    """Everybody is connected again, and the broker has their subscriptions: an answer to a flush comes after both."""
    async with asyncio.timeout(10.0):
        for bus in [router.service._bus, *[instance.bus for instance in router.mesh.alive]]:
            while True:
                try:
                    await bus.flush(0.5)
                    break
                except BusError:
                    await asyncio.sleep(0.02)


@pytest.mark.case("F9")
async def test_a_stream_goes_on_after_the_broker_came_back(router: Front, nats: Broker) -> None:
    decoder = await router.mesh.decoder(accepting)
    await router.until_ready(2)
    generate, task = await streaming(router, decoder)
    nats.kill()
    await router.until(lambda: not router.service._bus.connected)
    nats.start()
    await all_back(router)
    await decoder.emit(generate, 2, ids(TEXT)[2:])
    await decoder.emit(generate, len(ids(TEXT)), [], finish="stop")
    said = await task
    assert text_of(said) == TEXT
    assert events(said)[-1] == "[DONE]"


@pytest.mark.case("F9")
async def test_what_was_lost_with_the_broker_is_an_error(router: Front, nats: Broker) -> None:
    decoder = await router.mesh.decoder(accepting)
    await router.until_ready(2)
    generate, task = await streaming(router, decoder)
    nats.kill()
    await router.until(lambda: not router.service._bus.connected)
    nats.start()
    await all_back(router)
    await decoder.status(generate.router, {generate.attempt: 5})
    assert "3 token(s) were lost" in events(await task)[-1]


async def test_nobody_is_dead_because_the_broker_was(router: Front, nats: Broker) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    before = {known.ref for known in router.service.registry.instances}
    nats.kill()
    waited = asyncio.get_running_loop().time() + 2 * DEAD_AFTER_S
    await router.until(lambda: asyncio.get_running_loop().time() > waited)
    assert (await router.ready())[1]["reason"] == "the broker is away"
    assert {known.ref for known in router.service.registry.instances} == before
    nats.start()
    await all_back(router)
    assert (await router.answer())[0] == 200
    assert {known.ref for known in router.service.registry.instances} == before


async def test_a_request_meanwhile_waits_for_the_broker(router: Front, nats: Broker) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    nats.kill()
    await router.until(lambda: not router.service._bus.connected)
    request = asyncio.ensure_future(router.answer())
    await router.until(lambda: router.service.relay._running == 1)
    nats.start()
    async with asyncio.timeout(5.0):
        assert (await request)[0] == 200


async def test_it_does_not_wait_for_ever(router: Front, nats: Broker) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    nats.kill()
    await router.until(lambda: not router.service._bus.connected)
    status, body, headers = await router.answer()
    assert (status, body["error"]["message"], headers["Retry-After"]) == (503, "the broker is away", "1")
    nats.start()
    await all_back(router)


async def test_a_cancel_meanwhile_arrives_when_it_is_back(router: Front, nats: Broker) -> None:
    decoder = await router.mesh.decoder(accepting)
    await router.until_ready(2)
    generate, task = await streaming(router, decoder)
    nats.kill()
    await router.until(lambda: not router.service._bus.connected)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await router.until(lambda: len(router.service.relay.courier) == 1)
    nats.start()
    await all_back(router)
    await decoder.until(lambda: decoder.cancelled(generate))


async def test_a_broker_that_stands_still_kills_nobody(router: Front, nats: Broker) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    nats.freeze()
    waited = asyncio.get_running_loop().time() + 2 * DEAD_AFTER_S
    await router.until(lambda: asyncio.get_running_loop().time() > waited)
    assert len(router.service.registry.instances) == 2
    nats.thaw()
    async with asyncio.timeout(10.0):
        assert (await router.answer())[0] == 200


async def test_a_decoder_that_died_with_the_broker_is_noticed_afterwards(router: Front, nats: Broker) -> None:
    decoder = await router.mesh.decoder(accepting)
    await router.until_ready(2)
    _, task = await streaming(router, decoder)
    nats.kill()
    await router.mesh.kill(decoder)
    nats.start()
    await all_back(router)
    async with asyncio.timeout(2 * DEAD_AFTER_S + 1.0):
        assert "silent for more than" in events(await task)[-1]
