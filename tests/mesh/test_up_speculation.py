"""Speculation as a user starts it: `kvmesh up --speculate ...`, real processes; and what is said of a value that cannot be."""

from __future__ import annotations

import asyncio
import re

import pytest

from shared.engine.whole import Whole, WholeConfig
from tests import random_models
from tests.mesh.processes import start, up
from tests.mesh.test_up import prompt
from tests.mesh.test_up_layouts import ids

DEPLOYMENTS = [
    ("mtp", "mtp", ["--prefill-tp", "2", "--decode-dp", "2"]),
    ("llama", "draft:{draft}", ["--decode-tp", "2"]),
]


@pytest.mark.parametrize(("kind", "speculate", "flags"), DEPLOYMENTS)
async def test_it_serves_what_the_whole_model_says(tmp_path, kind, speculate, flags):
    directory = random_models.save_served(tmp_path / kind, kind=kind)
    draft = random_models.save_served(tmp_path / "draft", kind="qwen3", num_hidden_layers=1)
    whole = Whole(directory, WholeConfig(page_size=16, kv_tokens=2048))
    prompts = [prompt(n) for n in (1, 2, 17, 60, 100)]
    expected = [whole.generate([tokens], 8)[0] for tokens in prompts]
    async with up(directory, "--decoders", "1", "--speculate", speculate.format(draft=draft), *flags) as mesh:
        assert await asyncio.gather(*(ids(mesh, tokens) for tokens in prompts)) == expected
        metrics = (await mesh.http.get(mesh.parts["decode"][0] + "/metrics")).text
        assert float(re.findall(r"^kvmesh_decode_drafted_tokens_total (\S+)$", metrics, re.MULTILINE)[0]) > 0
        await mesh.until_idle()


async def test_a_model_that_has_no_such_layer_stops_it_with_one_line(served_directory):
    process = await start(served_directory, "--speculate", "mtp")
    said = (await asyncio.wait_for(process.communicate(), 60))[0].decode()
    assert process.returncode != 0
    assert "KVMESH_SPECULATE='mtp': takes another value: the model has no such layer" in said
    assert "Traceback" not in said
