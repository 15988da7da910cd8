"""`kvmesh doctor` as a process: a mesh that is well, one that is not, and none."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from services.prefill.metrics import PrefillMetrics
from services.up.nats_config import nats_config, new_passwords
from shared.messages import FabricEndpoint, Load
from shared.telemetry.metrics import new_registry
from shared.transfer.fabric import Fabric
from shared.web.health import Readiness, add_health
from shared.web.server import listening
from tests.broker import Broker
from tests.fake_mesh import FakeInstance, fake_mesh, saying

DEADLINE_S = 90.0


async def doctor(broker: Broker | None, *flags: str) -> tuple[int | None, dict[str, Any]]:
    """Exit status, and the findings by what they are about."""
    told = {"KVMESH_NATS_URL": "nats://127.0.0.1:1"}
    if broker is not None:
        told = {"KVMESH_NATS_URL": broker.url, "KVMESH_NATS_TOKEN": broker.token}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "doctor", "--json", *flags),
        env={"PATH": "/usr/bin:/bin", "IPATH_NO_BACKTRACE": "1", **told},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert err == b""
    said = json.loads(out)
    assert said["status"] == process.returncode
    return process.returncode, {finding["what"]: finding for finding in said["findings"]}


@asynccontextmanager
async def answering(instance: FakeInstance, fabric: Fabric, load: Load) -> AsyncIterator[None]:
    """It has HTTP and a fabric that can be reached."""
    app, registry = web.Application(), new_registry()
    if instance.announcement.role == "prefill":
        metrics = PrefillMetrics(registry)
        metrics.exposed.observe(0.005)
        metrics.transfer.observe(0.5)
        metrics.bytes.inc(1 << 20)
    add_health(app, lambda: Readiness(), registry)
    async with listening(app, "127.0.0.1", 0) as url:
        await instance.announce(http=url, fabric=FabricEndpoint("tcp", fabric.address), load=load)
        yield


def load(**fields: Any) -> Load:
    return Load(free_pages=9, largest_free_pages=9, total_pages=9, **fields)


async def test_a_mesh_that_is_well(nats: Broker) -> None:
    async with (
        fake_mesh(nats) as mesh,
        await Fabric.open(provider="tcp", host="127.0.0.1", identity=77) as fabric,
        answering(await mesh.decoder(saying(1)), fabric, load(step_s=0.02, running=2)),
        answering(await mesh.prefiller(), fabric, load(prefill_tokens_per_s=1e6)),
    ):
        status, found = await doctor(nats)
    assert status == 0, found
    assert {finding["level"] for finding in found.values()} <= {"ok", "warn"}
    assert found["broker"]["numbers"]["count"] == 100
    assert found["loopback"]["numbers"]["bytes_per_s"] > 0
    assert found["pairs"]["numbers"] == {"prefillers": 1, "decoders": 1, "pairs": 1}
    for what in ("decode d0", "prefill p0"):
        numbers = found[what]["numbers"]
        assert numbers["http_p50_s"] > 0
        assert numbers["fabric_connect_s"] > 0
        assert numbers["write_bandwidth_bytes_per_s"] is None
    assert found["prefill p0"]["numbers"]["served_bytes_per_s"] == (1 << 20) / 0.5
    numbers = found["break-even tiny"]["numbers"]
    assert (numbers["prefill_tokens_per_s"], numbers["step_s"], numbers["exposed_s"]) == (1e6, 0.02, 0.005)
    assert numbers["tokens_at_2_streams"] >= 1e6 * (0.005 + 1.5 * 0.02) / 2


async def test_what_cannot_be_reached_is_named(nats: Broker) -> None:
    async with fake_mesh(nats) as mesh:
        await mesh.decoder(saying(1))
        status, found = await doctor(nats)
    assert status == 1
    assert "no prefill instance is ready" in found["pairs"]["text"]
    assert found["decode d0"]["level"] == "fail"
    assert "http://127.0.0.1:1" in found["decode d0"]["text"]
    assert "not measured yet" in found["break-even tiny"]["text"]


async def test_a_user_that_may_not_listen_is_told_which_may(tmp_path: Path) -> None:
    passwords = new_passwords()
    config = tmp_path / "nats.conf"
    config.write_text(nats_config("127.0.0.1:-1", passwords))
    with Broker(config) as broker:
        flags = ("--nats-user", "decode", "--nats-password", passwords["decode"])
        status, found = await doctor(broker, *flags)
        assert status == 1
        assert (found["broker"]["level"], found["announcements"]["level"]) == ("ok", "fail")
        assert "the router's KVMESH_NATS_USER" in found["announcements"]["text"]
        flags = ("--nats-user", "router", "--nats-password", passwords["router"])
        _, found = await doctor(broker, *flags)
        assert "no prefill and no decode instance is ready" in found["pairs"]["text"]


async def test_without_a_broker_one_line_says_so() -> None:
    status, found = await doctor(None)
    assert status == 1
    assert found["broker"]["level"] == "fail"
    assert "no broker at nats://127.0.0.1:1" in found["broker"]["text"]
    assert "pairs" not in found


async def test_a_provider_that_is_not_there_fails() -> None:
    status, found = await doctor(None, "--fabric", "libfabric:nonesuch")
    assert status == 1
    assert found["libfabric"]["level"] == "fail"
    assert "loopback" not in found


async def test_a_bad_setting_and_a_short_deadline_are_findings() -> None:
    status, found = await doctor(None, "--page-size", "x")
    assert status == 1
    assert "KVMESH_PAGE_SIZE" in found["settings"]["text"]
    status, found = await doctor(None, "--deadline-s", "0.01")
    assert status == 1
    assert found["deadline"]["level"] == "fail"
