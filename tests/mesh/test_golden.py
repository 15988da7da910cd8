"""One output: greedy through the mesh is what the same model says run whole in one process, whatever the page size, the chunk
size, the length of the prompt and the batch mates."""

from __future__ import annotations

import asyncio
import random

import pytest

from shared.engine.whole import Whole, WholeConfig
from tests import random_models
from tests.inproc import ModelEngine, mesh, real_fabric

PAGE_SIZES = [4, 16]
CHUNKS = [7, 32]


@pytest.fixture(scope="module", params=random_models.KINDS)
def directory(request, tmp_path_factory):
    return random_models.save(request.param, tmp_path_factory.mktemp(request.param))


def boundary_lengths(page: int, chunk: int) -> list[int]:
    """Around every boundary of the n - 1 tokens that are prefilled: none, one, a page, a chunk, several of them."""
    edges = [1, page, 2 * page, chunk, 2 * chunk]
    return sorted({1, 2, 3} | {edge + 1 + d for edge in edges for d in (-1, 0, 1)})


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(160), k=length)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.case("C2")
async def test_mesh_equals_the_whole_model(directory, page, chunk):
    prompts = [prompt(n, n) for n in boundary_lengths(page, chunk)]
    whole = Whole(directory, WholeConfig(page_size=page, chunk_tokens=chunk, kv_tokens=8192))
    expected = [whole.generate([p], 8)[0] for p in prompts]
    async with mesh(real_fabric, ModelEngine(directory, page_size=page)) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=512, chunk_tokens=chunk)
        decoders = [await nodes.decoder(f"decode-{i}", pages=512) for i in range(2)]
        alone = [
            await router.run(decoders[i % 2], prefill.announce if len(p) > 1 else None, p, max_tokens=8)
            for i, p in enumerate(prompts)
        ]
        together = await asyncio.gather(
            *(
                router.run(decoders[i % 2], prefill.announce if len(p) > 1 else None, p, max_tokens=8)
                for i, p in enumerate(prompts)
            )
        )
        for node in (prefill, *decoders):
            await node.until_idle()
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 2, "the model says the same to everything"
    assert alone == expected
    assert together == expected


async def test_preemption_does_not_change_the_output(directory):
    prompts = [prompt(9, seed) for seed in range(4)]
    expected = [Whole(directory, WholeConfig(page_size=4, kv_tokens=4096)).generate([p], 24)[0] for p in prompts]
    async with mesh(real_fabric, ModelEngine(directory, page_size=4)) as nodes:
        router = await nodes.router()
        prefill = await nodes.prefiller(pages=64)
        decode = await nodes.decoder(pages=20)
        found = await asyncio.gather(*(router.run(decode, prefill.announce, p, max_tokens=24) for p in prompts))
        assert decode.service.ranks[0].scheduler.preempted > 0
        await decode.until_idle()
    assert found == expected
