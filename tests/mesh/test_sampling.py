"""Sampling through the mesh: what a request asks for is what the same model draws run whole in one process, whatever its batch
mates are, and whether or not it was preempted on the way."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.ints import pack_ints
from shared.engine.protocol import Row
from shared.engine.whole import Whole, WholeConfig
from shared.messages import RefusedReply, Sampling
from tests import random_models
from tests.inproc import ModelEngine, mesh, real_fabric

PAGE = 4
MAX_TOKENS = 16

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut": {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "bias": {"logit_bias": {5: 4.0, 6: -100.0}},
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": -2.0},
    "all": {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": -0.5, "logit_bias": {7: 2.0}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save("llama", tmp_path_factory.mktemp("llama"))


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(160), k=length)


def drawn(whole: Whole, tokens: list[int], sampling: Sampling) -> list[int]:
    """The same model, one row at a time, with all of the past in each row."""
    (pages,) = whole.page_tables([len(tokens) + MAX_TOKENS])
    whole.prefill(tokens[:-1], pages)
    past = list(tokens)
    for _ in range(MAX_TOKENS):
        row = Row(
            tokens=past[-1:],
            start=len(past) - 1,
            pages=pages,
            sample=sampling,
            history=pack_ints(past),
            prompt_tokens=len(tokens),
        )
        (token,) = whole.model.step([row])
        assert token is not None
        past.append(token)
    return past[len(tokens) :]


async def test_each_request_draws_as_if_alone(directory: Path) -> None:
    whole = Whole(directory, WholeConfig(page_size=PAGE, kv_tokens=1024))
    asked = [
        (prompt(9 + seed, seed), Sampling(temperature=temperature, seed=seed, **fields))
        for seed, fields in enumerate(SAMPLINGS.values())
        for temperature in (0.0, 1.0)
    ]
    expected = [drawn(whole, tokens, sampling) for tokens, sampling in asked]
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=128)
        roomy, tight = await nodes.decoder("roomy", pages=256), await nodes.decoder("tight", pages=22)

        async def run(decoder: Any, tokens: list[int], sampling: Sampling) -> list[int]:
            return await router.run(decoder, prefill.announce, tokens, sampling=sampling, max_tokens=MAX_TOKENS)

        alone = [await run(roomy, *one) for one in asked]
        together = await asyncio.gather(*(run(roomy, *one) for one in asked))
        preempted = [
            found
            for at in range(0, len(asked), 5)
            for found in await asyncio.gather(*(run(tight, *o) for o in asked[at : at + 5]))
        ]
        assert tight.service.ranks[0].scheduler.preempted > 0
    assert alone == expected
    assert together == expected
    assert preempted == expected
    plain = drawn(whole, asked[0][0], Sampling(temperature=0.0))
    for name, fields in list(SAMPLINGS.items())[2:]:
        assert drawn(whole, asked[0][0], Sampling(temperature=0.0, **fields)) != plain, f"{name} changes nothing"


async def test_stop_tokens_wait_for_min_tokens(directory: Path) -> None:
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill, decode = await nodes.prefiller(), await nodes.decoder()
        always = {"logit_bias": {8: 100.0}, "temperature": 0.0}

        async def run(**sampling: Any) -> list[int]:
            asked = Sampling(**{**always, **sampling})
            tokens = prompt(9, 0)
            return await router.run(decode, prefill.announce, tokens, sampling=asked, max_tokens=9, stop_token_ids=[8])

        assert await run() == []
        assert len(await run(min_tokens=3)) == 3
        assert 8 not in await run(min_tokens=9)
        assert len(await run(min_tokens=9)) == 9


async def test_a_bias_for_no_token_is_refused_before_it_meets_others(directory: Path) -> None:
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill, decode = await nodes.prefiller(), await nodes.decoder()
        sampling = Sampling(temperature=0.0, logit_bias={10**6: 1.0})
        answer = await router.send(router.generate(decode, prefill.announce, prompt(9, 0), sampling=sampling))
        assert isinstance(answer, RefusedReply)
        assert (answer.code, answer.retryable) == ("invalid", False)


@pytest.mark.parametrize("top", [0, 4])
async def test_log_probabilities_are_those_of_the_logits_before_anything_else(directory: Path, top: int) -> None:
    tokens = prompt(9, 0)
    sampling = Sampling(temperature=0.7, seed=3, top_k=50, repetition_penalty=1.3, logit_bias={5: 3.0}, logprobs=top)
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill, decode = await nodes.prefiller(), await nodes.decoder()
        generate = router.generate(decode, prefill.announce, tokens, sampling=sampling, max_tokens=5)
        other = router.generate(decode, prefill.announce, prompt(12, 1), max_tokens=5)
        await router.start(other)
        await router.start(generate)
        output = await router.result(generate)
        await router.result(other)
    known = [one for emit in router.emits[generate.attempt] for one in emit.logprobs]
    assert not any(emit.logprobs for emit in router.emits[other.attempt])
    whole = Whole(directory, WholeConfig(page_size=PAGE, kv_tokens=1024))
    (pages,) = whole.page_tables([64])
    logits = whole.model.all_logits([Row(tokens=tokens + output[:-1], start=0, pages=pages)])[len(tokens) - 1 :]
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    assert len(known) == len(output) == 5
    for i, (token, one) in enumerate(zip(output, known, strict=True)):
        assert one.logprob == pytest.approx(float(wanted[i, token]), abs=1e-3)
        assert [token for token, _ in one.top] == wanted[i].topk(top).indices.tolist()
