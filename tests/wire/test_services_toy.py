"""The prefill and decode services over a real broker, with a toy model: what they say and what they leave behind."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from shared import subjects
from shared.errors import BusError, MeshError, PeerLost
from shared.messages import Accepted, InstanceRef, RefusedReply, ToPrefiller
from tests.inproc import LAYOUT, Engine, mesh, real_fabric
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


SHARDED = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
LATENT = msgspec.structs.replace(LAYOUT, kind="mla")
SHARDINGS = [(prefill, decode) for prefill in (1, 2, 4, 8) for decode in (1, 2, 4, 8)]


@pytest.mark.parametrize("layout", [SHARDED, LATENT], ids=["gqa", "mla"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHARDINGS)
async def test_output_is_the_whole_models_for_every_pair_of_shardings(layout, prefill_tp, decode_tp):
    """Over several chunks, with a part-filled last page; the toy looks at every head of every rank."""
    prompts = [[(7 * i + n) % 96 + 1 for i in range(n)] for n in (2, 9, 18)]
    ranks = {"prefill": {"tp": prefill_tp}, "decode": {"tp": decode_tp}}
    async with small_mesh(Engine(layout), **ranks) as (_, router, prefill, decode):
        assert (prefill.announce.tp, decode.announce.tp) == (prefill_tp, decode_tp)
        results = await asyncio.gather(*(router.run(decode, prefill.announce, prompt) for prompt in prompts))
        assert results == [toy_output(prompt, 6) for prompt in prompts]
        await prefill.until_idle()
        await decode.until_idle()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 4), (4, 1), (8, 2)])
async def test_shardings_over_the_real_fabric(prefill_tp, decode_tp):
    prompt = [(5 * i) % 96 + 1 for i in range(18)]
    async with mesh(real_fabric, Engine(SHARDED)) as whole:
        router = await whole.router()
        prefill, decode = await whole.prefiller(tp=prefill_tp), await whole.decoder(tp=decode_tp)
        assert await router.run(decode, prefill.announce, prompt) == toy_output(prompt, 6)
        await prefill.until_idle()
        await decode.until_idle()


@pytest.mark.case("L3", "C3")
async def test_a_prefiller_refuses_a_sharding_that_does_not_fit():
    """The decoder was told another one, and asks."""
    engine = Engine(msgspec.structs.replace(LAYOUT, num_kv_heads=6))
    async with small_mesh(engine, prefill={"tp": 2}, decode={"tp": 3}) as (_, router, prefill, decode):
        forged = router.generate(decode, msgspec.structs.replace(prefill.announce, tp=3), [1, 2, 3])
        await router.start(forged)
        await router.until(lambda: router.ended(forged.attempt))
        assert "tp does not fit: prefiller has 2, decoder has 3, 6 KV heads" in router.emits[forged.attempt][-1].error
        honest = await router.send(router.generate(decode, prefill.announce, [1, 2, 3]))
        assert isinstance(honest, RefusedReply)
        assert (honest.code, "prefiller has 2, decoder has 3" in honest.reason) == ("mismatch", True)
        await decode.until_idle()


VERIFYING = {"prefill": {"verify": "pages"}, "decode": {"verify": "pages"}}


async def test_verified_pages_are_those_of_the_whole_model_over_the_real_fabric():
    async with mesh(real_fabric, Engine(SHARDED)) as whole:
        router = await whole.router()
        prefill = await whole.prefiller(tp=2, verify="pages")
        decode = await whole.decoder(tp=4, dp=2, verify="pages")
        prompts = [[(7 * i + n) % 96 + 1 for i in range(n)] for n in LENGTHS[1:]]
        outputs = await asyncio.gather(*(router.run(decode, prefill.announce, prompt) for prompt in prompts))
        assert outputs == [toy_output(prompt, 6) for prompt in prompts]
        await prefill.until_idle()
        await decode.until_idle()


async def test_a_byte_that_changed_on_the_way_fails_its_attempt_and_nothing_else():
    async with small_mesh(**VERIFYING) as (_, router, prefill, decode):
        memory = decode.service.ranks[0].digests
        honest = memory.take

        async def changed(pages, pieces):
            decode.executor.kv[0][LAYOUT.offset(1, pages[0], 32)] ^= 1
            return await honest(pages, pieces)

        memory.take = changed
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=3)
        end = router.emits[generate.attempt][-1]
        assert "transfer: page 0 (number 0 of the prompt), layer 1, is not what prefill wrote" in end.error
        assert end.retryable
        memory.take = honest
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)
        await decode.until_idle()
        await prefill.until_idle()


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_only_both_or_none_verify(who):
    async with small_mesh(**{who: VERIFYING[who]}) as (_, router, prefill, decode):
        generate = router.generate(decode, prefill.announce, [1, 2, 3, 4])
        await router.start(generate)
        await router.until(lambda: router.ended(generate.attempt), within_s=3)
        assert "verify differs" in router.emits[generate.attempt][-1].error
        await decode.until_idle()


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
