"""`kvmesh probe` and `kvmesh fetch`, as containers run them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web

from shared.telemetry.metrics import new_registry
from shared.web.health import Readiness, add_health
from shared.web.server import listening
from tests.random_models import save_served


async def kvmesh(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Exit status, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", *arguments),
        env={"PATH": "/usr/bin:/bin", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode().strip(), err.decode().strip()


async def test_a_probe_asks_whether_it_lives_or_is_ready() -> None:
    app = web.Application()
    add_health(app, lambda: Readiness(reason="no decode instance is there"), new_registry())
    async with listening(app, "127.0.0.1", 0) as url:
        told = {"KVMESH_HOST": "auto", "KVMESH_PORT": url.rsplit(":", 1)[1]}
        assert await kvmesh("probe", "live", **told) == (0, '{"status":"alive"}', "")
        status, _, said = await kvmesh("probe", **told)
        assert status == 1
        assert "503" in said
        assert "no decode instance is there" in said
    status, _, said = await kvmesh("probe", **told)
    assert status == 1
    assert "does not answer" in said


async def test_a_bad_setting_is_named() -> None:
    assert (await kvmesh("probe", KVMESH_PORT="x"))[2].startswith("kvmesh probe: KVMESH_PORT='x': takes")


async def test_fetch_says_where_the_model_is(tmp_path: Path) -> None:
    model = save_served(tmp_path / "tiny")
    assert (await kvmesh("fetch", KVMESH_MODEL=str(model)))[:2] == (0, str(model))
    status, out, said = await kvmesh("fetch", "no such model")
    assert (status, out) == (1, "")
    assert said.startswith("kvmesh fetch: model 'no such model': takes a directory, a hub id")


@pytest.mark.parametrize("role", ["router", "decode"])
async def test_auto_without_a_way_to_the_broker_is_one_line(role: str) -> None:
    told = {"KVMESH_HOST": "auto", "KVMESH_NATS_URL": "nats://nowhere.invalid:4222"}
    status, _, said = await kvmesh(role, **told)
    assert status == 1
    assert said.startswith(f"kvmesh {role}: KVMESH_HOST='auto': takes an address")
    assert "\n" not in said
