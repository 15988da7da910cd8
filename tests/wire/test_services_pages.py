"""Pages when they are short, and connections that have ended unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages import Accepted, RefusedReply
from tests.inproc import mesh, real_fabric
from tests.states_rig import rig
from tests.toy_executor import toy_output

HALF = [1 + i for i in range(60)]
"""With the token that follows it fills half of the decoder's pool."""


async def refused(router, generate) -> bool:
    answer = await router.send(generate)
    assert isinstance(answer, Accepted | RefusedReply)
    return isinstance(answer, RefusedReply) and answer.code == "busy"


@pytest.mark.case("F6", "L6")
async def test_pages_in_transit_and_in_quarantine_are_not_given_away():
    async with rig() as made:
        router = await made.whole.router()
        made.hold_writes()

        def another():
            return router.generate(made.decode, made.prefill.announce, HALF, max_tokens=2)

        first, second = another(), another()
        await router.start(first)
        await router.start(second)
        assert await refused(router, another()), "reserved, then in transit"
        await made.until(lambda: all(job.computed.is_set() for job in made.prefill.service._running.values()))
        assert await refused(router, another()), "in transit"
        await router.cancel(first)
        await made.until(lambda: made.pool.counts()["quarantined"] > 0)
        assert await refused(router, another()), "in quarantine"
        made.land()
        await made.until(lambda: made.pool.counts()["quarantined"] == 0)
        assert await router.result(second) == toy_output(HALF, 2)
        assert await router.run(made.decode, made.prefill.announce, HALF, max_tokens=2) == toy_output(HALF, 2)
        await made.until_idle()


@pytest.mark.case("F5")
async def test_two_small_pools_never_wait_for_one_another():
    """A decoder that is full refuses, a prefiller that is full lets wait; whoever is refused comes again."""
    async with rig() as made:
        router = await made.whole.router()
        prompts = [[1 + i + j for j in range(30 + i)] for i in range(16)]

        async def until_taken(prompt: list[int]) -> list[int]:
            while True:
                generate = router.generate(made.decode, made.prefill.announce, prompt, max_tokens=9)
                if not await refused(router, generate):
                    return await router.result(generate)
                await asyncio.sleep(0.01)

        async with asyncio.timeout(15):
            outputs = await asyncio.gather(*map(until_taken, prompts))
        assert outputs == [toy_output(prompt, 9) for prompt in prompts]
        await made.until_idle()


@pytest.mark.case("F4")
async def test_connections_that_ended_while_nothing_ran_are_made_anew():
    """Each side's in turn, as a firewall ends what was idle for long, and the broker's too."""
    async with mesh(real_fabric) as whole:
        router = await whole.router()
        prefill, decode = await whole.prefiller(), await whole.decoder()
        nodes = (prefill, decode)

        async def run(tokens):
            """One that meets the end of the old connection fails as one that may be tried again: the next one must not."""
            generate = router.generate(decode, prefill.announce, tokens)
            await router.start(generate)
            await router.until(lambda: router.ended(generate.attempt))
            if (last := router.emits[generate.attempt][-1]).error is None:
                return await router.result(generate)
            assert last.retryable
            assert "was lost" in last.error
            return await router.run(decode, prefill.announce, tokens)

        for ended, other in (nodes, nodes[::-1]):
            assert await run([1, 2, 3, 4, 5]) == toy_output([1, 2, 3, 4, 5], 6)
            await ended.instance.fabric.fence(other.instance.ref.incarnation)
        for bus in (prefill.instance.bus, decode.instance.bus):
            back = asyncio.Event()
            bus.on_reconnect(back.set)
            bus._client._transport.close()
            async with asyncio.timeout(5):
                await back.wait()
            await bus.flush()
        assert await run([5, 4, 3, 2]) == toy_output([5, 4, 3, 2], 6)
        await prefill.until_idle()
        await decode.until_idle()
