"""The deployments of the reference in small, as a user starts them: a mixture of experts with GQA, tensor parallel on both
sides; MLA, from tensor parallel prefill to data and expert parallel decode."""

from __future__ import annotations

import asyncio

import pytest

from shared.engine.whole import Whole, WholeConfig
from tests import random_models
from tests.mesh.processes import up
from tests.mesh.test_up import prompt

DEPLOYMENTS = [
    ("qwen3-moe", ["--prefill-tp", "4", "--decode-tp", "2"], {"tp": 2, "dp": 1, "ep": 1}),
    ("deepseek-v3", ["--prefill-tp", "2", "--decode-dp", "2"], {"tp": 1, "dp": 2, "ep": 2}),
]


@pytest.mark.parametrize(("kind", "flags", "shown"), DEPLOYMENTS)
async def test_it_serves_what_the_whole_model_says(tmp_path, kind, flags, shown):
    directory = random_models.save_served(tmp_path / kind, kind=kind)
    whole = Whole(directory, WholeConfig(page_size=16, kv_tokens=2048))
    prompts = [prompt(n) for n in (1, 2, 17, 60, 100)]
    expected = [whole.generate([tokens], 8)[0] for tokens in prompts]
    async with up(directory, "--decoders", "1", *flags) as mesh:
        answers = await asyncio.gather(*(ids(mesh, tokens) for tokens in prompts))
        assert answers == expected
        instances = (await mesh.http.get(mesh.url + "/ready")).json()["instances"]
        (decoder,) = [known for known in instances if known["role"] == "decode"]
        assert {name: decoder[name] for name in shown} == shown
        await mesh.until_idle()


async def ids(mesh, tokens: list[int]) -> list[int]:
    body = {"model": mesh.name, "prompt": tokens, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = await mesh.http.post(mesh.url + "/v1/completions", json={**body, "ignore_eos": True}, timeout=30)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found
