"""A client leaves, in whatever state its request is: the decoder hears of it at once, and the router keeps nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from services.router.attempts import Attempt
from services.router.relay import Request
from services.router.validate import Job
from shared.messages import Accepted, Generate, Load, TokenLogprob
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, accepting, refusing, saying, silent
from tests.front import Client, Front, asked, front, ids
from tests.unit.test_router_answers import job as any_job

TEXT = "the quick brown fox"

QUICK = {"max_attempts": 1}


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.prefiller()
        yield made


class Quiet:
    """A consumer that counts."""

    begun = stopped = False
    tokens = 0

    def reset(self) -> None:
        self.tokens = 0

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> bool:
        self.tokens += len(tokens)
        return True

    async def advance(self, attempt: Attempt) -> None:
        await asyncio.sleep(0)


class TestTheClientLeaves:
    """In whatever state: the decoder hears of it at once, and the router keeps nothing (checked by `front`)."""

    async def test_while_it_sends_its_request(self, router: Front) -> None:
        client = await Client.ask(router, part=0.5)
        client.leave()
        await router.until(lambda: router.metric("kvmesh_requests_total", endpoint="chat", outcome="disconnected") == 1)

    @pytest.mark.parametrize("stream", [True, False])
    async def test_while_it_waits_in_line(self, router: Front, stream: bool) -> None:
        decoder = await router.mesh.decoder(accepting, load=Load(free_pages=0, largest_free_pages=0, total_pages=100))
        await router.until_ready(2)
        client = await Client.ask(router, stream=stream)
        await router.until(lambda: len(router.service.relay.line) == 1)
        client.leave()
        await router.until(lambda: len(router.service.relay.line) == 0)
        assert decoder.generates == []

    @pytest.mark.parametrize("stream", [True, False])
    async def test_while_the_decoder_has_not_answered(self, router: Front, stream: bool) -> None:
        decoder = await router.mesh.decoder(silent)
        await router.until_ready(2)
        client = await Client.ask(router, stream=stream)
        generate = await asked(decoder)
        client.leave()
        await decoder.until(lambda: decoder.cancelled(generate), 1.0)

    @pytest.mark.parametrize("stream", [True, False])
    async def test_while_its_prompt_is_computed(self, router: Front, stream: bool) -> None:
        decoder = await router.mesh.decoder(accepting)
        await router.until_ready(2)
        client = await Client.ask(router, stream=stream)
        generate = await asked(decoder)
        await router.until(lambda: all(a.accepted for a in router.service.relay.table))
        client.leave()
        await decoder.until(lambda: decoder.cancelled(generate), 1.0)

    @pytest.mark.parametrize("stream", [True, False])
    async def test_while_tokens_come(self, router: Front, stream: bool) -> None:
        decoder = await router.mesh.decoder(saying(*ids(TEXT)[:3], finish=None))
        await router.until_ready(2)
        client = await Client.ask(router, stream=stream)
        generate = await asked(decoder)
        if stream:
            await client.read_until(b"\n\n")
        else:
            await router.until(lambda: any(a.received for a in router.service.relay.table))
        client.leave()
        await decoder.until(lambda: decoder.cancelled(generate), 1.0)
        await router.until(lambda: router.metric("kvmesh_requests_total", endpoint="chat", outcome="disconnected") == 1)

    async def test_in_the_moment_of_the_reply(self, router: Front) -> None:
        """The cancel follows the Generate on one connection, so it never comes before it."""
        order: list[str] = []

        async def script(decoder: FakeDecoder, generate: Generate) -> None:
            order.append("generate")
            client.leave()
            await decoder.until(lambda: decoder.cancelled(generate))
            order.append("cancel")
            await decoder.reply_to.reply(Accepted(generate.attempt))

        decoder = await router.mesh.decoder(script)
        await router.until_ready(2)
        client = await Client.ask(router)
        generate = await asked(decoder)
        await decoder.until(lambda: decoder.cancelled(generate))
        await decoder.until(lambda: len(order) == 2)
        assert order == ["generate", "cancel"]

    async def test_while_another_attempt_is_sought(self, router: Front) -> None:
        decoder = await router.mesh.decoder(refusing("unavailable"))
        await router.until_ready(2)
        client = await Client.ask(router)
        await asked(decoder)
        client.leave()
        await router.clean()

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.case("L8")
    async def test_at_any_step_of_the_event_loop(self, router: Front, stream: bool) -> None:
        """Cancels the request after so many turns of the loop, for every number of them until it is through."""
        decoder = await router.mesh.decoder(saying(*ids(TEXT)[:2], finish=None), max_batch=100)
        await router.until_ready(2)
        relay = router.service.relay
        through = 0
        for steps in range(120):
            consumer = Quiet()
            request = Request(job(stream), consumer, router.service.metrics, began=time.monotonic(), timeout_s=5.0)
            task = asyncio.create_task(relay.run(request))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            through += consumer.tokens == 2
            assert len(relay.table) == len(relay.line) == 0
        assert through, "some came as far as their tokens"
        await decoder.until(lambda: {g.attempt for g in decoder.generates} <= {c.attempt for c in decoder.cancels})

    @pytest.mark.case("L7")
    async def test_two_hundred_leave_within_a_second(self, router: Front) -> None:
        decoder = await router.mesh.decoder(accepting, max_batch=256)
        await router.until_ready(2)
        clients = await asyncio.gather(*[Client.ask(router, stream=True) for _ in range(200)])
        await decoder.until(lambda: len(decoder.generates) == 200)
        for client in clients:
            client.leave()
        await decoder.until(lambda: len(decoder.cancels) == 200, 1.0)
        assert {c.attempt for c in decoder.cancels} == {g.attempt for g in decoder.generates}
        await router.clean()
        decoder.script = saying(*ids(TEXT))
        status, body, _ = await router.answer()
        assert (status, body["choices"][0]["message"]["content"]) == (200, TEXT)


def job(stream: bool) -> Job:
    return any_job(stream=stream)
