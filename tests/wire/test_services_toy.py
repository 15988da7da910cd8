"""The prefill and decode services over a real broker, with a toy model: what they say and what they leave behind."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from shared.errors import PeerLost
from shared.messages import Accepted, InstanceRef, RefusedReply
from tests.inproc import LAYOUT, mesh, real_fabric
from tests.landing_fabric import LandingFabric
from tests.toy_executor import toy_output


@asynccontextmanager
async def small_mesh(engine=None, **settings):
    """One router stub, one prefiller, one decoder over the by-hand fabric, whose writes land at once."""
    network = {}

    async def open_fabric(identity):
        return LandingFabric(identity, network)

    async with mesh(open_fabric, engine) as whole:
        router = await whole.router()
        prefill = await whole.prefiller(**settings.get("prefill", {}))
        decode = await whole.decoder(**settings.get("decode", {}))
        yield whole, router, prefill, decode


LENGTHS = [1, 2, 3, 4, 5, 6, 8, 9, 10, 16, 17, 18, 33]


async def test_output_is_the_whole_models_for_every_length():
    async with small_mesh() as (_, router, prefill, decode):
        for n in LENGTHS:
            prompt = [(7 * i) % 96 + 1 for i in range(n)]
            prefiller = prefill.announce if n > 1 else None
            assert await router.run(decode, prefiller, prompt) == toy_output(prompt, 6), f"{n} tokens"
        await prefill.until_idle()
        await decode.until_idle()


async def test_many_at_once():
    async with small_mesh(decode={"pages": 64}) as (_, router, prefill, decode):
        prompts = [[(i * j) % 96 + 1 for j in range(2 + i)] for i in range(12)]
        outputs = await asyncio.gather(*(router.run(decode, prefill.announce, p, max_tokens=9) for p in prompts))
        assert outputs == [toy_output(p, 9) for p in prompts]
        assert max(len(step.rows) for (step,) in decode.executor.steps) > 1, "they were not batched"
        await prefill.until_idle()
        await decode.until_idle()


@pytest.mark.case("F5")
async def test_out_of_pages_preempts_and_the_client_does_not_notice():
    async with small_mesh(decode={"pages": 10}) as (_, router, prefill, decode):
        prompts = [[i + 1, 5, 9, 2, 8] for i in range(4)]
        outputs = await asyncio.gather(*(router.run(decode, prefill.announce, p, max_tokens=14) for p in prompts))
        assert outputs == [toy_output(p, 14) for p in prompts]
        assert decode.service.ranks[0].scheduler.preempted > 0
        await decode.until_idle()


async def test_a_cancel_during_the_chunk_frees_both_sides():
    async with small_mesh() as (_, router, prefill, decode):
        prefill.executor.gate.clear()
        generate = router.generate(decode, prefill.announce, list(range(1, 30)))
        await router.start(generate)
        await prefill.executor.entered.wait()
        await router.cancel(generate)
        await decode.until_idle()
        (pool,) = prefill.instance.pools
        assert pool.free < pool.num_pages, "the forward still uses its pages"
        prefill.executor.gate.set()
        await prefill.until_idle()
        assert len(prefill.executor.steps) == 1, "no further chunk of a cancelled prompt is computed"
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)
        assert generate.attempt not in router.emits


async def test_a_cancel_while_writes_are_held_back_keeps_the_pages_until_drained():
    async with small_mesh() as (_, router, prefill, decode):
        prefill.instance.fabric.hold = True
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4, 5, 6])
        await router.start(generate)
        await prefill.executor.entered.wait()
        await router.cancel(generate)
        await prefill.until_idle()
        await decode.until_idle()
        prefill.instance.fabric.hold = False
        assert await router.run(decode, prefill.announce, [4, 5]) == toy_output([4, 5], 6)


async def test_a_cancel_in_the_running_batch():
    async with small_mesh() as (_, router, prefill, decode):
        generate = router.generate(decode, prefill.announce, [1, 2, 3], max_tokens=90)
        decode.executor.gate.clear()
        await router.start(generate)
        await decode.executor.entered.wait()
        await router.cancel(generate)
        await router.cancel(generate)
        decode.executor.gate.set()
        await decode.until_idle()
        await prefill.until_idle()


async def test_a_failed_prefill_step_reaches_the_router_at_once():
    async with small_mesh() as (_, router, prefill, decode):
        prefill.executor.fail_next("out of memory")
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4, 5, 6])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=2)
        assert "out of memory" in router.emits[generate.attempt][-1].error
        await decode.until_idle()
        await prefill.until_idle()
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)


async def test_a_failed_decode_step_reaches_the_router_at_once():
    async with small_mesh() as (_, router, prefill, decode):
        decode.executor.fail_next("bad row")
        generate = router.generate(decode, prefill.announce, [1, 2, 3])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=2)
        assert "bad row" in router.emits[generate.attempt][-1].error
        await decode.until_idle()


@pytest.mark.case("L1", "F1")
async def test_a_prefiller_that_is_gone_is_an_error_at_once():
    async with small_mesh() as (_, router, prefill, decode):
        gone = prefill.announce
        await prefill.stop()
        await prefill.instance.bus._client.close()
        generate = router.generate(decode, gone, [1, 2, 3])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=2)
        last = router.emits[generate.attempt][-1]
        assert last.retryable
        assert "gone" in last.error
        await decode.until_idle()


async def test_a_lost_prefiller_fails_what_came_from_it_and_is_fenced():
    async with small_mesh() as (_, router, prefill, decode):
        prefill.instance.fabric.hold = True
        generate = router.generate(decode, prefill.announce, [1, 2, 3])
        await router.start(generate)
        await prefill.executor.entered.wait()
        identity = prefill.instance.ref.incarnation
        for callback in decode.instance.fabric.callbacks:
            callback(identity, PeerLost("end of file", peer=identity))
        await router.until(lambda: router.ended(generate.attempt), within_s=2)
        assert "lost" in router.emits[generate.attempt][-1].error
        await decode.until_idle()
        assert identity in decode.instance.fabric.fenced


@pytest.mark.parametrize("held", [True, False])
async def test_the_deadline_ends_it_everywhere(held):
    async with small_mesh() as (_, router, prefill, decode):
        (prefill if held else decode).executor.gate.clear()
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4], budget_s=0.3)
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=3) if held else None
        (prefill if held else decode).executor.gate.set()
        await router.until(lambda: router.ended(generate.attempt), within_s=3)
        last = router.emits[generate.attempt][-1]
        if held:
            assert "deadline" in last.error
            assert not last.retryable
        await decode.until_idle()
        await prefill.until_idle()


@pytest.mark.case("L7")
async def test_two_hundred_cancels_in_a_second():
    async with small_mesh(decode={"pages": 1024, "max_waiting": 400}, prefill={"pages": 512}) as (
        _,
        router,
        prefill,
        decode,
    ):
        prefill.executor.gate.clear()
        sent = [router.generate(decode, prefill.announce, list(range(1, 12))) for _ in range(200)]
        answers = await asyncio.gather(*(router.send(generate) for generate in sent))
        assert all(isinstance(answer, Accepted) for answer in answers)
        await asyncio.gather(*(router.cancel(generate) for generate in sent))
        async with asyncio.timeout(2):  # half of it is for a machine that does other things too
            await decode.service.idle.wait()
            await until(lambda: all(job.has_failed for job in prefill.service._running.values()))
        await decode.until_idle()
        steps = len(prefill.executor.steps)
        prefill.executor.gate.set()
        await prefill.until_idle()
        assert len(prefill.executor.steps) == steps, "nothing more of what was cancelled is computed"
        prompts = [[3, 1, 4 + i] for i in range(20)]
        outputs = await asyncio.gather(*(router.run(decode, prefill.announce, p) for p in prompts))
        assert outputs == [toy_output(p, 6) for p in prompts]


async def test_ten_cancelled_long_prompts_delay_a_short_one_by_the_chunk_that_runs():
    async with small_mesh(decode={"pages": 1024}, prefill={"pages": 512}) as (_, router, prefill, decode):
        prefill.executor.close_at = 3
        long = [router.generate(decode, prefill.announce, [i + 1] * 100) for i in range(10)]
        for generate in long:
            await router.start(generate)
        await until(lambda: len(prefill.executor.steps) == 3)
        await asyncio.gather(*(router.cancel(generate) for generate in long))
        await decode.until_idle()
        short = router.generate(decode, prefill.announce, [1, 2, 3, 4, 5])
        await router.start(short)
        await until(lambda: prefill.service._scheduler.queued == 1)
        prefill.executor.gate.set()
        assert await router.result(short) == toy_output([1, 2, 3, 4, 5], 6)
        assert len(prefill.executor.steps) == 4, "its own step is the next one"
        await prefill.until_idle()


@pytest.mark.case("L3", "L5")
async def test_refusals_reserve_nothing():
    async with small_mesh() as (_, router, prefill, decode):
        stale = router.generate(decode, prefill.announce, [1, 2])
        wrong = InstanceRef(stale.decoder.name, stale.decoder.incarnation)
        duplicate = router.generate(decode, prefill.announce, [1, 2], max_tokens=90, attempt="ab" * 16)
        decode.executor.gate.clear()
        assert isinstance(await router.send(duplicate), Accepted)
        answer = await router.send(duplicate)
        assert isinstance(answer, RefusedReply)
        assert answer.code == "duplicate"
        too_long = router.generate(decode, prefill.announce, [1] * 5000)
        answer = await router.send(too_long)
        assert isinstance(answer, RefusedReply)
        assert answer.code == "invalid"
        await router.cancel(duplicate)
        decode.executor.gate.set()
        await decode.until_idle()
        await prefill.until_idle()
        assert wrong == decode.instance.ref


async def test_a_router_that_is_gone_loses_its_attempts():
    async with small_mesh() as (whole, router, prefill, decode):
        other = await whole.router()
        generate = other.generate(decode, prefill.announce, [1, 2, 3], max_tokens=90)
        decode.executor.gate.clear()
        await other.start(generate)
        await decode.executor.entered.wait()
        await other.bus._client.close()
        decode.executor.gate.set()
        await decode.until_idle()
        assert await router.run(decode, prefill.announce, [5, 6]) == toy_output([5, 6], 6)


async def until_back(bus):
    """Connected again, and the broker has seen its subscriptions."""
    if not bus.connected:
        back = asyncio.Event()
        bus.on_reconnect(back.set)
        async with asyncio.timeout(5):
            await back.wait()
    await bus.flush()


@pytest.mark.case("F9")
async def test_the_broker_goes_and_comes_back():
    async with small_mesh() as (whole, router, prefill, decode):
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)
        await whole.broker.process.stop(grace_s=0)
        await whole.broker.start()
        await asyncio.gather(*(until_back(bus) for bus in (prefill.instance.bus, decode.instance.bus, router.bus)))
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)
        await prefill.until_idle()
        await decode.until_idle()


def test_the_toy_layout_is_worth_testing():
    assert LAYOUT.num_layers > 1


async def test_a_bad_descriptor_fails_its_attempt_alone():
    """On the real fabric: what a peer sends is checked before it is used, and one bad attempt hurts no other."""
    async with mesh(real_fabric) as whole:
        router = await whole.router()
        prefill = await whole.prefiller(chunk_tokens=64)
        decode, bad = await whole.decoder("decode"), await whole.decoder("bad")
        region = bad.instance.regions[0]
        honest = region.grant

        def forged_grant(offset, length):
            grant = honest(offset, length)
            grant.descriptor = b"nonsense"
            return grant

        region.grant = forged_grant
        good = router.generate(decode, prefill.announce, [1, 2, 3, 4, 5, 6])
        forged = router.generate(bad, prefill.announce, [6, 5, 4, 3, 2, 1])
        await asyncio.gather(router.start(good), router.start(forged))
        assert await router.result(good) == toy_output([1, 2, 3, 4, 5, 6], 6)
        await router.until(lambda: router.ended(forged.attempt), within_s=3)
        assert "descriptor" in router.emits[forged.attempt][-1].error
        for node in (prefill, decode, bad):
            await node.until_idle()


async def test_a_wrong_tail_fails_its_attempt_and_nothing_else():
    async with small_mesh() as (_, router, prefill, decode):
        sender = prefill.service.sender
        honest = sender._write_tail

        def forged(outgoing, payload):
            transfer = honest(outgoing, payload)
            sender._tails[outgoing.slot.tail_offset : outgoing.slot.tail_offset + 4] = b"NOPE"
            return transfer

        sender._write_tail = forged
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=3)
        assert "tail context: magic" in router.emits[generate.attempt][-1].error
        sender._write_tail = honest
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)
        await decode.until_idle()
        await prefill.until_idle()


async def test_a_router_hears_of_its_attempts_before_their_first_token():
    async with small_mesh() as (_, router, prefill, decode):
        prefill.executor.gate.clear()
        generate = router.generate(decode, prefill.announce, [1, 2, 3])
        await router.start(generate)
        await router.until(lambda: any(s.emitted == {generate.attempt: 0} for s in router.statuses), within_s=3)
        prefill.executor.gate.set()
        assert await router.result(generate) == toy_output([1, 2, 3], 6)


async def test_pages_that_come_free_wake_a_starved_batch():
    """A preempted sequence waits for the pages of an attempt that never runs: when that one is given up, it goes on."""
    async with small_mesh(decode={"pages": 8}) as (_, router, prefill, decode):
        growing = router.generate(decode, prefill.announce, [1, 2, 3], max_tokens=20)
        decode.executor.gate.clear()
        await router.start(growing)
        await decode.executor.entered.wait()
        prefill.executor.gate.clear()
        waiting = router.generate(decode, prefill.announce, list(range(1, 18)))
        await router.start(waiting)
        decode.executor.gate.set()
        await until(lambda: decode.service.ranks[0].scheduler.starved)
        await router.cancel(waiting)
        assert await router.result(growing) == toy_output([1, 2, 3], 20)
        prefill.executor.gate.set()
        await decode.until_idle()
        await prefill.until_idle()


async def until(condition):
    """For what no event tells of."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
