"""The mesh as its user starts it: `kvmesh up`, real processes, a tiny real model; and what happens to it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.mesh.processes import Failed, start, up


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, 300), k=length)


async def test_it_serves_and_streams_and_stops(served_directory, expected):
    async with up(served_directory) as mesh:
        assert set(mesh.parts) == {"broker", "router", "prefill", "decode-1", "decode-2"}
        for n in (1, 2, 17, 100):
            assert await mesh.complete(prompt(n)) == expected(prompt(n)), f"{n} tokens"
        client = mesh.openai
        stream = await client.chat.completions.create(
            model=mesh.name,
            messages=[{"role": "user", "content": "The capital of France"}],
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 12
        assert chunks[-2].choices[0].finish_reason == "length"
        await mesh.until_idle()
    assert mesh.process.returncode == 0
    assert "stopping" in mesh.lines[-1]


async def test_a_client_that_leaves_mid_prompt_frees_everything(served_directory, expected):
    async with up(served_directory, "--decoders", "1") as mesh:
        body = {"model": mesh.name, "prompt": prompt(480), "max_tokens": 8, "stream": True}
        for turns in range(12):
            await ask_and_leave(mesh.url, "/v1/completions", body, turns)
        await mesh.until_idle()
        assert await mesh.complete(prompt(40)) == expected(prompt(40))
        await mesh.until_idle()


@pytest.mark.parametrize("victim", ["decode-1", "decode-2", "prefill", "router"])
@pytest.mark.case("F3")
async def test_a_killed_part_is_started_again_and_the_next_request_works(served_directory, expected, victim):
    async with up(served_directory, "--restart", "yes") as mesh:
        busy = [asyncio.create_task(ask(mesh, seed)) for seed in range(6)]
        await asyncio.sleep(0)
        await mesh.kill_and_wait(victim)
        answers = await asyncio.gather(*busy)
        for seed, answer in enumerate(answers):
            assert answer is None or answer == expected(prompt(200, seed)), "a wrong or cut answer"
        await until_answers(mesh, expected)
        await mesh.until_idle()


@pytest.mark.case("F9")
async def test_the_broker_is_killed_and_comes_back(served_directory, expected):
    async with up(served_directory, "--restart", "yes") as mesh:
        broker = await broker_pid(mesh)
        busy = [asyncio.create_task(ask(mesh, seed)) for seed in range(6)]
        await asyncio.sleep(0)
        before = mesh.starts["broker"]
        os.kill(broker, signal.SIGKILL)
        await mesh.until_line("broker     ended")
        answers = await asyncio.gather(*busy)
        for seed, answer in enumerate(answers):
            assert answer is None or answer == expected(prompt(200, seed)), "a wrong or cut answer"
        await until_answers(mesh, expected)
        await mesh.until_idle()
        assert before == 1


async def test_without_restart_a_dead_part_ends_the_mesh_with_one_line(served_directory):
    async with up(served_directory, "--decoders", "1") as mesh:
        mesh.kill("decode")
        async with asyncio.timeout(30):
            assert await mesh.process.wait() == 1
    errors = [line for line in mesh.lines if line.startswith("kvmesh up:")]
    assert errors == ["kvmesh up: decode ended with signal 9 (SIGKILL)"]


async def test_a_taken_port_is_one_clear_line(served_directory):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start(served_directory, "--port", str(port))
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
    assert process.returncode == 1
    said = output.decode().splitlines()
    assert any(f"KVMESH_PORT={port}" in line and "a free port" in line for line in said), said
    assert said[-1] == "kvmesh up: router did not start: it ended with status 1"


async def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    process = await start(tmp_path / "nothing")
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert str(tmp_path / "nothing") in output.decode()
    assert "Traceback" not in output.decode()


async def ask(mesh, seed: int) -> str | None:
    """A completion, or None where the mesh said clearly that it failed."""
    try:
        return await mesh.complete(prompt(200, seed))
    except (Failed, httpx.TransportError):
        return None  # a clear error, or the router itself was killed


async def ask_and_leave(url: str, path: str, body: dict, turns: int) -> None:
    """Sends a request and breaks the connection, without a look at the answer, some turns of the event loop later."""
    where = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head.encode() + content)
    await writer.drain()
    for _ in range(turns):
        await asyncio.sleep(0.001)
    writer.transport.abort()


async def until_answers(mesh, expected) -> None:
    async with asyncio.timeout(20):
        while await ask(mesh, 99) != expected(prompt(200, 99)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def broker_pid(mesh) -> int:
    children = Path(f"/proc/{mesh.process.pid}/task/{mesh.process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if "nats-server" in Path(f"/proc/{pid}/cmdline").read_text())


async def test_the_openai_client_raises_on_a_bad_request(served_directory):
    async with up(served_directory, "--decoders", "1") as mesh:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await mesh.openai.chat.completions.create(
                model=mesh.name, messages=[{"role": "user", "content": "x"}], temperature=9
            )
