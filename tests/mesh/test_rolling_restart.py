"""Every instance is restarted, one after another, under load, with two of each: no request fails."""

from __future__ import annotations

import asyncio
import signal

from tests.mesh.processes import Up, up
from tests.mesh.test_up import prompt

WORKERS = 4
INSTANCES = ("prefill-1", "decode-1", "prefill-2", "decode-2")


async def restart(mesh: Up, name: str) -> None:
    """SIGTERM, and until it is ready again and the router uses it."""
    before = mesh.starts[name]
    mesh.kill(name, signal.SIGTERM)
    await mesh.until(lambda: mesh.starts[name] > before)


async def keep_asking(mesh: Up, right: list[tuple[list[int], str]], stop: asyncio.Event) -> int:
    """Until `stop`; how many were answered, each rightly. Raises `Failed` at the first that was not."""
    answered = 0
    while not stop.is_set():
        tokens, text = right[answered % len(right)]
        assert await mesh.complete(tokens, max_tokens=24) == text
        answered += 1
    return answered


async def test_a_rolling_restart_fails_no_request(served_directory, expected):
    flags = ["--prefillers", "2", "--decoders", "2", "--restart", "yes"]
    async with up(served_directory, *flags, KVMESH_CHUNK_TOKENS="64", KVMESH_DRAIN_S="10") as mesh:
        prompts = [prompt(length, length) for length in (1, 17, 40, 100, 220)]
        right = [(tokens, expected(tokens, 24)) for tokens in prompts]
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(keep_asking(mesh, right, stop)) for _ in range(WORKERS)]
            for name in INSTANCES:
                await restart(mesh, name)
            stop.set()
        assert all(worker.result() > len(INSTANCES) for worker in workers), "they asked all the while"
        assert [mesh.starts[name] for name in INSTANCES] == [2, 2, 2, 2]
        said = [line for line in mesh.lines if "ended with" in line]
        assert all("ended with status 0" in line for line in said), said
        await mesh.until_idle()
