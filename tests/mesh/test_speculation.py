"""One output, with and without speculation: whatever is proposed, in whatever layout, whoever is preempted, a request gets the
tokens and log-probabilities that it gets without."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from shared.messages import Sampling
from tests import random_models
from tests.inproc import ModelEngine, Node, StubRouter, mesh, real_fabric

PAGE = 4
MAX_TOKENS = 20
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2)]
"""(Prefill TP, decode TP, decode DP)."""

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "top_k": 20, "logprobs": 0},
    {"temperature": 0.3, "seed": 9},
    {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": -3.0},
    {"temperature": 0.2, "seed": 2, "presence_penalty": -0.5, "min_tokens": 5},
]


def prompts() -> list[list[int]]:
    """Repetitive ones, as those whose proposals stand, and others; one of one token."""
    chosen = random.Random(3)
    phrases = [chosen.choices(range(160), k=length) for length in (3, 5, 2, 7)]
    return [*(phrase * (12 // len(phrase) + 1) for phrase in phrases), chosen.choices(range(160), k=17), [11]]


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save(request.param, tmp_path_factory.mktemp(request.param))


async def outputs(router: StubRouter, decode: Node, prefill: Node) -> list[tuple[list[int], list[Any]]]:
    """Tokens and log-probabilities of every prompt with every sampling, all at once."""
    asked = [
        router.generate(
            decode,
            prefill.announce if len(tokens) > 1 else None,
            tokens,
            sampling=Sampling(**sampling),
            max_tokens=MAX_TOKENS,
            stop_token_ids=[7],
            budget_s=60.0,
        )
        for tokens, sampling in zip(prompts(), SAMPLINGS, strict=True)
    ]
    for one in asked:
        await router.start(one)
    found = []
    for one in asked:
        tokens = await router.result(one)
        emits = router.emits[one.attempt]
        assert all(len(emit.logprobs) in (0, len(emit.tokens)) for emit in emits)
        found.append((tokens, [known for emit in emits for known in emit.logprobs]))
    return found


def counted(decode: Node) -> tuple[float, float]:
    """(Drafted, accepted)."""
    metrics = decode.service._metrics
    return metrics.drafted._value.get(), metrics.accepted._value.get()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_output_is_that_without_speculation(directory: Path, layout: tuple[int, int, int]) -> None:
    prefill_tp, tp, dp = layout
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=128, tp=prefill_tp)
        plain = await nodes.decoder("plain", pages=128, tp=tp, dp=dp)
        speculating = await nodes.decoder("speculating", pages=128, tp=tp, dp=dp, speculate="ngram", draft_tokens=4)
        expected = await outputs(router, plain, prefill)
        found = await outputs(router, speculating, prefill)
        for node in (prefill, plain, speculating):
            await node.until_idle()
        drafted, accepted = counted(speculating)
    assert found == expected
    assert 0 < accepted < drafted
    assert any(len(known) == len(tokens) > 5 for tokens, known in found)


async def test_preemption_and_speculation(directory: Path) -> None:
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=128)
        plain = await nodes.decoder("plain", pages=128)
        tight = await nodes.decoder("tight", pages=30, speculate="ngram", draft_tokens=4)
        expected = await outputs(router, plain, prefill)
        found = await outputs(router, tight, prefill)
        assert tight.service.ranks[0].scheduler.preempted > 0
        await tight.until_idle()
        drafted, _ = counted(tight)
    assert found == expected
    assert drafted > 0


async def test_requests_together_are_as_alone(directory: Path) -> None:
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=128)
        decode = await nodes.decoder(pages=128, speculate="ngram", draft_tokens=4)
        tokens = prompts()[0]

        async def run(seed: int) -> list[int]:
            sampling = Sampling(temperature=0.3, seed=seed)
            return await router.run(decode, prefill.announce, tokens, sampling=sampling, max_tokens=MAX_TOKENS)

        alone = [await run(seed) for seed in range(6)]
        assert await asyncio.gather(*(run(seed) for seed in range(6))) == alone
