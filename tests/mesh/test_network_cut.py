"""The network of one part is cut under load: others answer where there are others, and all is as before when it is back."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from tests.broker import Broker
from tests.mesh.network import Network, NoNamespaces, network
from tests.mesh.processes import Failed, Up
from tests.mesh.test_rank_death import Answer, instances, stream
from tests.mesh.test_rolling_restart import keep_asking
from tests.mesh.test_up import prompt

INSTANCES = ("prefill-1", "prefill-2", "decode-1", "decode-2")
STREAMED = 450
"""Tokens of a stream that a cut is to meet."""
HOSTS = ("broker", "router", *INSTANCES)


class Spread(Up):
    """A mesh over hosts, asked as one of `kvmesh up` is."""

    def __init__(self, http: httpx.AsyncClient, name: str, net: Network) -> None:
        self.http, self.name, self.net = http, name, net
        self.parts: dict[str, tuple[str, int]] = {}

    async def start(self, stack: AsyncExitStack, part: str, environment: dict[str, str]) -> None:
        command = [*self.net.inside(part), sys.executable, "-m", f"services.{part.split('-')[0]}"]
        address = self.net.address(part)
        own = {"KVMESH_NAME": part, "KVMESH_HOST": address, "KVMESH_FABRIC_HOST": address}
        process = await asyncio.create_subprocess_exec(
            *command, env={**environment, **own}, stdout=asyncio.subprocess.PIPE
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
        broker = stack.enter_context(Broker(host=net.address("broker"), inside=net.inside("broker")))
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
            for part in ("router", *INSTANCES):
                starting.create_task(mesh.start(stack, part, told))
        for role in ("prefill", "decode"):
            await mesh.until_count(role, 2)
        yield mesh


async def answered(
    answers: Sequence[Answer], streams: Sequence[asyncio.Task[None]], expected: Callable[..., str]
) -> None:
    """Each is whole and right, or ends with an error, and none takes long to."""
    async with asyncio.timeout(20):
        await asyncio.gather(*streams)
    for answer in answers:
        assert answer.done != (answer.error is not None), "an answer is whole, or ends with an error"
        if answer.done:
            assert answer.text == expected(prompt(40, answer.seed), STREAMED)


async def until_it_serves(mesh: Spread, tokens: list[int], right: str) -> None:
    async with asyncio.timeout(10):
        while await said(mesh, tokens) != right:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def said(mesh: Spread, tokens: list[int]) -> str | None:
    """None: a clear error."""
    try:
        return await mesh.complete(tokens)
    except Failed:
        return None


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


@pytest.mark.case("F9")
@pytest.mark.parametrize("part", ["router", "broker"])
async def test_a_cut_front_or_broker_under_load(served_directory, expected, part):
    """Nobody can answer for them: streams wait, or end with an error. Who is behind the cut holds nothing for long."""
    async with spread(served_directory) as mesh:
        for cut, mend in ((mesh.net.pull, mesh.net.plug), (mesh.net.lose, mesh.net.find)):
            answers = [Answer(seed) for seed in range(6)]
            async with asyncio.TaskGroup() as tasks:
                streams = [tasks.create_task(stream(mesh, answer, STREAMED)) for answer in answers]
                async with asyncio.timeout(20):
                    await asyncio.gather(*(answer.began.wait() for answer in answers))
                cut(part)
                await mesh.until_idle(10)
                assert not all(answer.done for answer in answers), "the cut hit nobody"
                mend(part)
                await answered(answers, streams, expected)
            await until_it_serves(mesh, prompt(100), expected(prompt(100)))
            await mesh.until_idle(10)
