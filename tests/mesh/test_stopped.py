"""SIGSTOP of each part, idle and busy: noticed within seconds, answered by others where there are others, and back after
SIGCONT as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx
import pytest

from tests.mesh.processes import Failed, up
from tests.mesh.test_rank_death import Answer, executors, instances, stream, until_fewer
from tests.mesh.test_up import broker_pid, prompt

NOTICED_S = 3.5
TWO_OF_EACH = ("--prefillers", "2", "--decoders", "2")


async def until_there(mesh, role: str, count: int) -> None:
    async with asyncio.timeout(10):
        while await instances(mesh, role) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def answers_of(mesh, count: int, length: int) -> list[str | None]:
    """Of so many at once; None: a clear error."""

    async def one(seed: int) -> str | None:
        try:
            return await mesh.complete(prompt(length, seed))
        except (Failed, httpx.TransportError):
            return None

    return await asyncio.gather(*(one(seed) for seed in range(count)))


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.case("F3")
async def test_a_stopped_instance_is_left_alone_and_comes_back(served_directory, expected, role):
    async with up(served_directory, *TWO_OF_EACH, KVMESH_CHUNK_TOKENS="32") as mesh:
        victim = f"{role}-1"
        busy = asyncio.create_task(answers_of(mesh, 8, 400))
        mesh.kill(victim, signal.SIGSTOP)
        assert await until_fewer(mesh, role, 2) < NOTICED_S
        assert await busy == [expected(prompt(400, seed)) for seed in range(8)], (
            "nothing was streamed: the others answer"
        )
        mesh.kill(victim, signal.SIGCONT)
        await until_there(mesh, role, 2)
        await mesh.until_idle()
        mesh.kill(victim, signal.SIGSTOP)
        assert await mesh.complete(prompt(40)) == expected(prompt(40)), "idle: whoever asks first does not notice"
        assert await until_fewer(mesh, role, 2) < NOTICED_S
        mesh.kill(victim, signal.SIGCONT)
        await until_there(mesh, role, 2)
        mesh.kill(f"{role}-2", signal.SIGSTOP)
        right = [expected(prompt(100, seed)) for seed in range(4)]
        assert await answers_of(mesh, 4, 100) == right, "it works again: there is no other"
        mesh.kill(f"{role}-2", signal.SIGCONT)
        await until_there(mesh, role, 2)
        await mesh.until_idle()


@pytest.mark.parametrize("part", ["router", "broker"])
async def test_a_stopped_front_or_broker_is_waited_for(served_directory, expected, part):
    async with up(served_directory, *TWO_OF_EACH) as mesh:
        pid = mesh.parts["router"][1] if part == "router" else await broker_pid(mesh)
        busy = [Answer(seed) for seed in range(4)]
        streams = [asyncio.create_task(stream(mesh, answer, 300)) for answer in busy]
        await asyncio.gather(*(answer.began.wait() for answer in busy))
        os.kill(pid, signal.SIGSTOP)
        meanwhile = asyncio.create_task(answers_of(mesh, 4, 100))
        await asyncio.wait(streams, timeout=3.5)
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*streams)
        for answer in busy:
            assert answer.done != (answer.error is not None), "an answer is whole, or ends with an error"
            if answer.done:
                assert answer.text == expected(prompt(40, answer.seed), 300)
        for seed, text in enumerate(await meanwhile):
            assert text in (None, expected(prompt(100, seed)))
        async with asyncio.timeout(10):
            while await answers_of(mesh, 1, 100) != [expected(prompt(100, 0))]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await mesh.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_instance_whose_executor_is_stopped_is_started_again(served_directory, expected, role):
    async with up(served_directory, *TWO_OF_EACH, "--restart", "yes", KVMESH_CHUNK_TOKENS="32") as mesh:
        victim = f"{role}-1"
        busy = asyncio.create_task(answers_of(mesh, 8, 400))
        began = time.monotonic()
        os.kill(executors(mesh, victim)[0], signal.SIGSTOP)
        await mesh.until_line(f"kvmesh {victim}: the executor", within_s=NOTICED_S)
        assert await busy == [expected(prompt(400, seed)) for seed in range(8)]
        await mesh.until(lambda: mesh.starts[victim] == 2)
        assert time.monotonic() - began < 20
        await until_there(mesh, role, 2)
        await mesh.until_idle()
