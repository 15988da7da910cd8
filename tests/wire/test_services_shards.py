"""KV between unequal shardings, and checked page by page: the services over a toy model that looks at every head."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.messages import RefusedReply
from tests.inproc import LAYOUT, Engine, mesh, real_fabric
from tests.toy_executor import toy_output
from tests.wire.test_services_toy import LENGTHS, small_mesh

SHARDED = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
LATENT = msgspec.structs.replace(LAYOUT, kind="mla")
DRAFTED = msgspec.structs.replace(LATENT, draft=msgspec.structs.replace(SHARDED, num_layers=2, head_dim=3))
SHARDINGS = [(prefill, decode) for prefill in (1, 2, 4, 8) for decode in (1, 2, 4, 8)]


@pytest.mark.parametrize("layout", [SHARDED, LATENT, DRAFTED], ids=["gqa", "mla", "drafted"])
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
    async with mesh(real_fabric, Engine(DRAFTED)) as whole:
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


@pytest.mark.parametrize("whose", ["prefill", "decode"])
async def test_only_those_with_the_same_drafter_work_together(whose):
    """The router would not pair them: whoever is asked all the same says why not."""
    async with small_mesh() as (_, router, prefill, decode):
        announce = prefill.announce
        if whose == "prefill":
            object.__setattr__(prefill.instance, "drafter", "mtp")
            generate = router.generate(decode, announce, [1, 2, 3, 4])
            await router.start(generate)
            await router.until(lambda: router.ended(generate.attempt), within_s=3)
            why = router.emits[generate.attempt][-1].error
        else:
            changed = msgspec.structs.replace(announce, drafter="mtp")
            why = (await router.send(router.generate(decode, changed, [1, 2, 3, 4]))).reason
        assert "speculate differs: prefiller has mtp, decoder has no drafter" in why
        await decode.until_idle()
