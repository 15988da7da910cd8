"""One output, for each network and each pair of layouts that fits: greedy through the mesh, from whatever tensor parallel
prefiller to whatever tensor and data parallel decoder, is what the same model says run whole in one process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from shared.engine.whole import Whole, WholeConfig
from shared.models.config import load_config
from tests import random_models
from tests.inproc import ModelEngine, mesh, real_fabric
from tests.mesh.test_golden import prompt

PAGE = 8
PREFILL_TP = [1, 2, 4]
DECODE = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
"""(Tensor, data parallel)."""

LENGTHS = [2, 9, 26, 40]
"""A token to prefill, a page to the token, two chunks with a part-filled last page."""


@pytest.fixture(scope="module", params=random_models.KINDS)
def directory(request, tmp_path_factory):
    experts = {"num_experts": 8} if request.param == "qwen3-moe" else {}  # which four ranks can share
    return random_models.save(request.param, tmp_path_factory.mktemp(request.param), **experts)


@asynccontextmanager
async def every_layout(directory):
    """A router, a prefiller and a decoder of each layout; each is paired with all of the others' kind."""
    async with mesh(real_fabric, ModelEngine(directory, page_size=PAGE)) as nodes:
        router = await nodes.router()
        prefillers = [nodes.prefiller(f"prefill-tp{tp}", tp=tp, pages=64, chunk_tokens=24) for tp in PREFILL_TP]
        decoders = [nodes.decoder(f"decode-tp{tp}-dp{dp}", tp=tp, dp=dp, pages=64) for tp, dp in DECODE]
        yield router, [await node for node in prefillers], [await node for node in decoders]


async def test_output_is_the_whole_models_for_every_pair_of_layouts(directory):
    prompts = [prompt(n, n) for n in LENGTHS]
    whole = Whole(directory, WholeConfig(page_size=PAGE, kv_tokens=1024))
    expected = [whole.generate([p], 8)[0] for p in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "the model says the same to everything"
    wrong = {}
    async with every_layout(directory) as (router, prefillers, decoders):
        for prefill in prefillers:
            for decode in decoders:
                found = await asyncio.gather(*(router.run(decode, prefill.announce, p, max_tokens=8) for p in prompts))
                if found != expected:
                    wrong[prefill.instance.ref.name, decode.instance.ref.name] = found
        spread = {node.announce.ep for node in decoders}
        assert spread == ({1, 2, 4} if load_config(directory).experts else {1}), "experts are spread over all ranks"
        for node in (*prefillers, *decoders):
            await node.until_idle()
    assert not wrong, f"expected {expected}"
