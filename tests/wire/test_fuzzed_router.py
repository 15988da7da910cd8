"""Instances that lie to a router: it goes on, answers every request, and has nothing of a lie left when the liar is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import subjects
from shared.messages import Emit, EmitBatch, Generate, InstanceRef, StreamStatus, Timing
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, announcement, saying
from tests.front import DEAD_AFTER_S, Front, front, ids
from tests.mutation import encoded

TEXT = "hello"
PLACE = "00" * 16
"""Where the attempt's id goes in a lie that was made before it was known."""


@pytest.fixture
def runner(caplog: pytest.LogCaptureFixture) -> Iterator[asyncio.Runner]:
    """What runs in it leaves no traceback in the log: a lie is an answer, not an accident."""
    with asyncio.Runner() as made:
        yield made
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


class Liar:
    """Says what it was given before it does what a decoder does."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bytes]] = []

    async def script(self, decoder: FakeDecoder, generate: Generate) -> None:
        for subject, said in self.said:
            said = said.replace(PLACE.encode(), generate.attempt.encode())
            await decoder.bus._client.publish(subject, said)
        self.said.clear()
        await saying(*ids(TEXT))(decoder, generate)


def lies(router: Front, decoder: InstanceRef) -> st.SearchStrategy[tuple[str, bytes]]:
    me = router.service.me
    timing = Timing(admitted_to_ready_s=0.1, first_step_s=0.1, transferred_bytes=10)
    emit = Emit(attempt=PLACE, index=0, tokens=ids(TEXT)[:2], timing=timing)
    batch = EmitBatch(decoder=decoder, router=me, emits=[emit])
    status = StreamStatus(decoder=decoder, router=me, emitted={PLACE: 0})
    mine = subjects.inbox("router", me)
    announced = encoded(announcement("decode", "liar", 5)) | encoded(announcement("prefill", "liar", 6))
    return (
        announced.map(lambda said: (subjects.ANNOUNCE, said))
        | encoded(batch).map(lambda said: (mine, said))
        | encoded(status).map(lambda said: (mine, said))
    )


def test_instances_that_say_anything(runner: asyncio.Runner, shared_broker: Broker) -> None:
    stack = AsyncExitStack()
    router = runner.run(stack.enter_async_context(front(shared_broker)))
    liar = Liar()
    statuses: list[int] = []

    async def start() -> FakeDecoder:
        decoder = await router.mesh.decoder(liar.script)
        await router.mesh.prefiller()
        await router.until_ready(2)
        return decoder

    async def one(said: list[tuple[str, bytes]]) -> None:
        liar.said = list(said)
        async with asyncio.timeout(8):
            statuses.append((await router.answer())[0])
            assert router.service.relay.table.late >= 0
            async with router.session.get(router.url + "/metrics") as response:
                assert response.status == 200
            assert (await router.ready())[0] in (200, 503)

    async def works() -> None:
        await router.until(lambda: len(router.service.registry.instances) == 2, timeout_s=DEAD_AFTER_S + 3)
        status, body, _ = await router.answer()
        assert (status, body["choices"][0]["message"]["content"]) == (200, TEXT)

    decoder = runner.run(start())

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(st.lists(lies(router, decoder.ref), min_size=1, max_size=4))
    def throw(said: list[tuple[str, bytes]]) -> None:
        runner.run(one(said))

    try:
        throw()
        runner.run(works())
        assert set(statuses) <= {200, 500, 503}
        assert statuses.count(200) > len(statuses) // 2
    finally:
        runner.run(stack.aclose())
