"""The network of one instance is cut in the middle of transfers: others answer, and all is as before when it is back."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from tests.broker import Broker
from tests.mesh.network import Network, NoNamespaces, network
from tests.mesh.processes import Up
from tests.mesh.test_rank_death import instances
from tests.mesh.test_rolling_restart import keep_asking
from tests.mesh.test_up import prompt

HOSTS = ("prefill-1", "prefill-2", "decode-1", "decode-2")


class Spread(Up):
    """A mesh over hosts, asked as one of `kvmesh up` is."""

    def __init__(self, http: httpx.AsyncClient, name: str, net: Network) -> None:
        self.http, self.name, self.net = http, name, net
        self.parts: dict[str, tuple[str, int]] = {}

    async def start(self, stack: AsyncExitStack, part: str, environment: dict[str, str]) -> None:
        inside = self.net.inside(part) if part in HOSTS else []
        service = part.split("-")[0]
        process = await asyncio.create_subprocess_exec(
            *(*inside, sys.executable, "-m", f"services.{service}"), env=environment, stdout=asyncio.subprocess.PIPE
        )
        stack.push_async_callback(_end, process)
        async with asyncio.timeout(30):
            while not (line := (await process.stdout.readline()).decode()).startswith("ready"):
                assert line, f"{part} did not start"
        self.parts[part] = (dict(word.split("=", 1) for word in line.split()[1:])["http"], process.pid)

    async def until_count(self, role: str, count: int) -> None:
        async with asyncio.timeout(20):
            while await instances(self, role) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    async with asyncio.timeout(20):
        await process.communicate()


@asynccontextmanager
async def spread(directory) -> AsyncIterator[Spread]:
    async with AsyncExitStack() as stack:
        try:
            net = stack.enter_context(network(*HOSTS))
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        broker = stack.enter_context(Broker(host=net.gateway))
        http = await stack.enter_async_context(httpx.AsyncClient())
        mesh = Spread(http, directory.name, net)
        told = {
            **os.environ,
            "KVMESH_MODEL": str(directory),
            "KVMESH_NATS_URL": broker.url,
            "KVMESH_NATS_TOKEN": broker.token,
            "KVMESH_PAGE_SIZE": "16",
            "KVMESH_KV_TOKENS": "4096",
            "KVMESH_THREADS": "1",
            "KVMESH_CHUNK_TOKENS": "16",
            "KVMESH_LOG_LEVEL": "error",
            "KVMESH_DRAIN_S": "2",
            "KVMESH_PORT": "0",
        }
        async with asyncio.TaskGroup() as starting:
            starting.create_task(mesh.start(stack, "router", told))
            for host in HOSTS:
                address = net.address(host)
                own = {"KVMESH_NAME": host, "KVMESH_HOST": address, "KVMESH_FABRIC_HOST": address}
                starting.create_task(mesh.start(stack, host, {**told, **own}))
        for role in ("prefill", "decode"):
            await mesh.until_count(role, 2)
        yield mesh


async def retries(mesh: Spread) -> float:
    metrics = (await mesh.http.get(mesh.url + "/metrics")).text
    return sum(float(count) for count in re.findall(r'kvmesh_retries_total\{outcome="made"\} (\S+)', metrics))


@pytest.mark.case("F3")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_cut_network_under_load(served_directory, expected, role):
    """Link down, then 100 % loss: before the first byte another pair answers, within the deadline."""
    right = [(tokens, expected(tokens, 24)) for tokens in (prompt(length, length) for length in (480, 350, 220))]
    victim = f"{role}-1"
    async with spread(served_directory) as mesh:
        for cut, mend in ((mesh.net.pull, mesh.net.plug), (mesh.net.lose, mesh.net.find)):
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                workers = [tasks.create_task(keep_asking(mesh, right, stop)) for _ in range(6)]
                assert await mesh.complete(right[0][0], max_tokens=24) == right[0][1]
                cut(victim)
                await mesh.until_count(role, 1)
                stop.set()
            assert all(worker.result() for worker in workers)
            mend(victim)
            await mesh.until_count(role, 2)
            await mesh.until_idle(20)
        assert await retries(mesh) > 0, "the cut hit nobody"
        assert await mesh.complete(prompt(40)) == expected(prompt(40))
