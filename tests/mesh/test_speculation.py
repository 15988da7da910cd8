"""One output, with and without speculation: whatever is proposed, in whatever layout, whoever is preempted, a request gets the
tokens and log-probabilities that it gets without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shared.messages import RefusedReply, Sampling
from tests import random_models
from tests.inproc import ModelEngine, Node, StubRouter, mesh, real_fabric

PAGE = 4
MAX_TOKENS = 20
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2)]
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


class Case(NamedTuple):
    """A model, and who proposes."""

    directory: Path
    settings: dict[str, Any]
    drafted: dict[str, Any]
    """What the engine of instances that speculate has besides."""

    def engine(self, *, drafted: bool = True) -> ModelEngine:
        return ModelEngine(self.directory, page_size=PAGE, **(self.drafted if drafted else {}))


CASES = ["llama-ngram", "llama-draft", "llama-itself", "deepseek-v3-draft", "deepseek-v3-mtp"]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model, _, proposer = request.param.rpartition("-")
    folder = tmp_path_factory.mktemp(request.param)
    target = folder / "model"
    directory = random_models.save_mtp(target) if proposer == "mtp" else random_models.save(model, target)
    if proposer in ("ngram", "mtp"):
        drafted = {"drafter": "mtp"} if proposer == "mtp" else {}
        return Case(directory, {"speculate": proposer}, drafted)
    draft = directory
    if proposer == "draft":
        draft = random_models.save("qwen3", folder / "draft", num_hidden_layers=2, num_key_value_heads=4, head_dim=8)
    return Case(directory, {"speculate": f"draft:{draft}"}, {"drafter": "model", "draft": draft})


async def outputs(
    router: StubRouter, prefill: Node, decode: Node, *, stop: Sequence[int] = (7,), max_tokens: int = MAX_TOKENS
) -> list[tuple[list[int], list[Any]]]:
    """Tokens and log-probabilities of every prompt with every sampling, all at once."""
    asked = [
        router.generate(
            decode,
            prefill.announce if len(tokens) > 1 else None,
            tokens,
            sampling=Sampling(**sampling),
            max_tokens=max_tokens,
            stop_token_ids=list(stop),
            budget_s=60.0,
        )
        for tokens, sampling in zip(prompts(), SAMPLINGS, strict=True)
    ]
    async with asyncio.timeout(60):
        for one in asked:
            while isinstance(answer := await router.send(one), RefusedReply):
                assert answer.code == "busy", "pages of a preempted one are not given to others"
                await asyncio.sleep(0.002)
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


@asynccontextmanager
async def plain_and_speculating(
    case: Case, *, pages: int = 160, prefill_tp: int = 1, **layout: int
) -> AsyncIterator[tuple[StubRouter, StubRouter, list[Node], list[Node]]]:
    """Two meshes with a router: a prefiller and a decoder that do not speculate, and two that do, the decoder with `pages`."""
    async with (
        mesh(real_fabric, case.engine(drafted=False)) as nodes,
        mesh(real_fabric, case.engine()) as drafted,
    ):
        router = await nodes.router()
        drafted_router = await drafted.router()
        plain = [
            await nodes.prefiller("p", pages=160, tp=prefill_tp),
            await nodes.decoder("d", pages=160, **layout),
        ]
        speculating = [
            await drafted.prefiller("sp", pages=160, tp=prefill_tp, **case.settings),
            await drafted.decoder("sd", pages=pages, draft_tokens=4, **layout, **case.settings),
        ]
        yield router, drafted_router, plain, speculating


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_output_is_that_without_speculation(case: Case, layout: tuple[int, int, int]) -> None:
    prefill_tp, tp, dp = layout
    async with plain_and_speculating(case, prefill_tp=prefill_tp, tp=tp, dp=dp) as (router, other, plain, speculating):
        expected = await outputs(router, *plain)
        found = await outputs(other, *speculating)
        for node in (*plain, *speculating):
            await node.until_idle()
        drafted, accepted = counted(speculating[1])
    assert found == expected
    assert drafted > 0
    assert accepted > 0 or case.settings["speculate"] != "ngram"
    assert any(len(known) == len(tokens) > 5 for tokens, known in found)


async def test_preemption_and_speculation(case: Case) -> None:
    async with plain_and_speculating(case, pages=32) as (router, other, plain, speculating):
        expected = await outputs(router, *plain, stop=(), max_tokens=60)
        found = await outputs(other, *speculating, stop=(), max_tokens=60)
        assert speculating[1].service.ranks[0].scheduler.preempted > 0
        for node in speculating:
            await node.until_idle()
        drafted, _ = counted(speculating[1])
    assert found == expected
    assert drafted > 0


async def test_requests_together_are_as_alone(case: Case) -> None:
    async with mesh(real_fabric, case.engine()) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=128, **case.settings)
        decode = await nodes.decoder(pages=128, draft_tokens=4, **case.settings)
        tokens = prompts()[0]

        async def run(seed: int) -> list[int]:
            sampling = Sampling(temperature=0.3, seed=seed)
            return await router.run(decode, prefill.announce, tokens, sampling=sampling, max_tokens=MAX_TOKENS)

        alone = [await run(seed) for seed in range(6)]
        assert await asyncio.gather(*(run(seed) for seed in range(6))) == alone
        if case.settings["speculate"].endswith(str(case.directory)):
            drafted, accepted = counted(decode)
            assert drafted == accepted > 0, "a model that drafts for itself is always right"
