"""A decoder of several data parallel ranks over a real broker, with a toy model: a pool and a batch a rank, one step of all."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.errors import PeerLost
from shared.messages import RefusedReply
from tests.inproc import LAYOUT, Engine
from tests.toy_executor import toy_output
from tests.wire.test_services_toy import small_mesh, until

SHARDED = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
LATENT = msgspec.structs.replace(LAYOUT, kind="mla")
LAYOUTS = [(p, d, dp) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8) for dp in (2, 3)]


def prompts(count, length=5):
    return [[(7 * i + 3 * n) % 96 + 1 for i in range(length)] for n in range(count)]


def rows(step):
    """Of each data parallel rank."""
    return [len(each.rows) for each in step]


@pytest.mark.parametrize("layout", [SHARDED, LATENT], ids=["gqa", "mla"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "decode_dp"), LAYOUTS)
async def test_output_is_the_whole_models_for_every_pair_of_layouts(layout, prefill_tp, decode_tp, decode_dp):
    """Two requests a rank, over several chunks, with a part-filled last page."""
    asked = [[(7 * i + n) % 96 + 1 for i in range(n)] for n in (2, 9, 18, 3, 10, 17)]
    ranks = {"prefill": {"tp": prefill_tp}, "decode": {"tp": decode_tp, "dp": decode_dp}}
    async with small_mesh(Engine(layout), **ranks) as (_, router, prefill, decode):
        assert (decode.announce.tp, decode.announce.dp) == (decode_tp, decode_dp)
        results = await asyncio.gather(*(router.run(decode, prefill.announce, prompt) for prompt in asked))
        assert results == [toy_output(prompt, 6) for prompt in asked]
        await prefill.until_idle()
        await decode.until_idle()


async def test_the_load_tells_of_all_pools_and_of_the_emptiest():
    async with small_mesh(decode={"dp": 2, "pages": 8}) as (_, router, prefill, decode):
        decode.executor.gate.clear()
        await router.start(router.generate(decode, prefill.announce, prompts(1)[0]))
        await decode.executor.entered.wait()
        load = decode.announce.load
        assert (load.total_pages, load.free_pages, load.largest_free_pages) == (16, 14, 8)
        assert decode.announce.pool_pages == 8
        decode.executor.gate.set()
        await decode.until_idle()


async def test_ranks_step_together_and_one_without_rows_takes_part():
    async with small_mesh(decode={"dp": 3}) as (_, router, prefill, decode):
        assert await router.run(decode, prefill.announce, [1, 2, 3]) == toy_output([1, 2, 3], 6)
        alone = [rows(step) for step in decode.executor.steps]
        assert alone == [[1, 0, 0]] * 6
        decode.executor.gate.clear()
        sent = [router.generate(decode, prefill.announce, p) for p in prompts(3)]
        for generate in sent:
            await router.start(generate)
        assert [len(pool.owners()) for pool in decode.instance.pools] == [1, 1, 1]
        await until(lambda: all(rank.scheduler.ready or rank.scheduler.running for rank in decode.service.ranks))
        decode.executor.gate.set()
        assert [await router.result(generate) for generate in sent] == [toy_output(g.tokens, 6) for g in sent]
        assert [1, 1, 1] in [rows(step) for step in decode.executor.steps]
        steps = len(decode.executor.steps)
        await decode.until_idle()
        assert len(decode.executor.steps) == steps, "nothing to run on any rank, and yet it steps"


async def test_a_step_that_fails_on_one_rank_fails_its_rows_alone():
    async with small_mesh(decode={"dp": 2}) as (_, router, prefill, decode):
        first, second = (router.generate(decode, prefill.announce, p) for p in prompts(2))
        decode.executor.gate.clear()
        for generate in (first, second):
            await router.start(generate)
        decode.executor.fail_next("bad row", rank=1)
        decode.executor.gate.set()
        assert await router.result(first) == toy_output(first.tokens, 6)
        await router.until(lambda: router.ended(second.attempt))
        assert "decode step: bad row" in router.emits[second.attempt][-1].error
        await decode.until_idle()


async def test_a_cancel_and_a_deadline_take_one_ranks_request_alone():
    async with small_mesh(decode={"dp": 3}) as (_, router, prefill, decode):
        kept, cancelled, late = (
            router.generate(decode, prefill.announce, p, max_tokens=20, **more)
            for p, more in zip(prompts(3), ({}, {}, {"budget_s": 0.2}), strict=True)
        )
        decode.executor.gate.clear()
        for generate in (kept, cancelled, late):
            await router.start(generate)
        await decode.executor.entered.wait()
        await router.cancel(cancelled)
        await asyncio.sleep(0.25)
        decode.executor.gate.set()
        assert await router.result(kept) == toy_output(kept.tokens, 20)
        await router.until(lambda: router.ended(late.attempt))
        assert "deadline" in router.emits[late.attempt][-1].error
        assert cancelled.attempt not in router.emits
        await decode.until_idle()
        await prefill.until_idle()


async def test_preemption_is_for_pages_of_the_ranks_own_pool():
    async with small_mesh(decode={"dp": 2, "pages": 10}) as (_, router, prefill, decode):
        asked = [[n + 1, 5, 9, 2, 8] for n in range(7)]
        results = await asyncio.gather(*(router.run(decode, prefill.announce, p, max_tokens=14) for p in asked))
        assert results == [toy_output(p, 14) for p in asked]
        assert all(rank.scheduler.preempted for rank in decode.service.ranks)
        await decode.until_idle()


async def test_a_request_that_no_rank_can_take_is_refused_though_all_together_could():
    async with small_mesh(decode={"dp": 2, "pages": 8}) as (_, router, prefill, decode):
        prefill.executor.gate.clear()
        held = [router.generate(decode, prefill.announce, [n] * 19) for n in (1, 2)]
        for generate in held:
            await router.start(generate)
        busy = await router.send(router.generate(decode, prefill.announce, [3] * 19))
        assert isinstance(busy, RefusedReply)
        assert (busy.code, busy.reason) == ("busy", "5 page(s) are wanted; free are 3 of 8, 3 of 8")
        long = await router.send(router.generate(decode, prefill.announce, [3] * 30, max_tokens=9))
        assert isinstance(long, RefusedReply)
        assert (long.code, long.retryable) == ("invalid", False)
        assert "need 10 pages; the pool has 8" in long.reason
        prefill.executor.gate.set()
        assert [await router.result(generate) for generate in held] == [toy_output([n] * 19, 6) for n in (1, 2)]
        await decode.until_idle()


async def test_what_comes_to_another_rank_is_not_touched_by_a_lost_prefiller():
    """Quarantine, fence and release are of the pool that the attempt's pages are in."""
    async with small_mesh(decode={"dp": 2}) as (whole, router, prefill, decode):
        other = await whole.prefiller("other")
        prefill.instance.fabric.hold = True
        lost = router.generate(decode, prefill.announce, [1, 2, 3, 4, 5])
        await router.start(lost)
        await prefill.executor.entered.wait()
        other.executor.gate.clear()
        kept = router.generate(decode, other.announce, [5, 4, 3, 2, 1])
        await router.start(kept)
        identity = prefill.instance.ref.incarnation
        for callback in decode.instance.fabric.callbacks:
            callback(identity, PeerLost("end of file", peer=identity))
        await router.until(lambda: router.ended(lost.attempt))
        await until(lambda: decode.instance.pools[0].free == decode.instance.pools[0].num_pages)
        assert decode.instance.pools[1].counts()["in_transit"] == 1
        decode.service.check_integrity()
        other.executor.gate.set()
        assert await router.result(kept) == toy_output([5, 4, 3, 2, 1], 6)
        await decode.until_idle()


async def test_a_ledger_that_is_off_on_any_rank_is_noticed():
    async with small_mesh(decode={"dp": 2}) as (_, _, _, decode):
        decode.service.check_integrity()
        decode.instance.pools[1]._free.pop()
        with pytest.raises(AssertionError, match="pages are lost"):
            decode.service.check_integrity()
