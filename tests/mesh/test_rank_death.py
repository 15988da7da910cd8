"""kill -9 of one rank's process: its instance goes down, names the rank, and says so itself; the router knows within two
seconds; a client gets an error or the whole answer."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.mesh.processes import up
from tests.mesh.test_up import prompt

KNOWS_WITHIN_S = 2.0


def executors(mesh, part: str) -> list[int]:
    """The process ids of a part's executors, in the order of ranks."""
    pid = mesh.parts[part][1]
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return sorted(
        child for child in children if b"shared.engine.executor" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def kill_rank(mesh, part: str, rank: int) -> None:
    os.kill(executors(mesh, part)[rank], signal.SIGKILL)


async def instances(mesh, role: str) -> int:
    """How many the router counts as ready."""
    metrics = (await mesh.http.get(mesh.url + "/metrics")).text
    found = re.search(rf'kvmesh_instances\{{role="{role}",state="ready"\}} (\S+)', metrics)
    assert found, metrics
    return int(float(found[1]))


async def until_fewer(mesh, role: str, before: int) -> float:
    """Seconds until the router counts one less."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while await instances(mesh, role) >= before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return time.monotonic() - began


async def until_back(mesh, name: str) -> None:
    """Until it was started again, and nothing is left of anything on any instance."""
    await mesh.until(lambda: mesh.starts[name] == 2)
    await mesh.until_idle()


@asynccontextmanager
async def sharded(directory, *ranks, **environment):
    """Two of each; a part that dies is started again, which takes longer than the router may to know."""
    flags = ["--prefillers", "2", "--decoders", "2", "--restart", "yes"]
    async with up(directory, *flags, *ranks, **environment) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("role", "ranks"), [("prefill", "--prefill-tp"), ("decode", "--decode-tp"), ("decode", "--decode-dp")]
)
async def test_an_idle_instance_that_loses_a_rank_is_gone_at_once_and_names_it(served_directory, expected, role, ranks):
    async with sharded(served_directory, ranks, "2") as mesh:
        assert await mesh.complete(prompt(40)) == expected(prompt(40))
        kill_rank(mesh, f"{role}-1", 1)
        assert await until_fewer(mesh, role, 2) < KNOWS_WITHIN_S
        await mesh.until_line(f"kvmesh {role}-1: the executor ended with signal 9: rank 1 of 2")
        await mesh.until_line(f"{role + '-1':<10} ended with status 1")
        assert await mesh.complete(prompt(40)) == expected(prompt(40)), "the other one serves"
        await until_back(mesh, f"{role}-1")


async def test_streams_of_a_decoder_that_loses_a_rank_end_with_an_error_never_cut(served_directory, expected):
    async with sharded(served_directory, "--decode-tp", "2") as mesh:
        answers = [Answer(seed) for seed in range(6)]
        streams = [asyncio.create_task(stream(mesh, answer, 400)) for answer in answers]
        async with asyncio.timeout(10):
            for answer in answers:
                await answer.began.wait()
        kill_rank(mesh, "decode-1", 1)
        assert await until_fewer(mesh, "decode", 2) < KNOWS_WITHIN_S
        await asyncio.gather(*streams)
        whole = [answer for answer in answers if answer.error is None]
        assert 0 < len(whole) < 6, "both decoders had streams"
        for answer in answers:
            assert answer.done != (answer.error is not None), "an answer is whole, or ends with an error"
            if answer.error is None:
                assert answer.text == expected(prompt(40, answer.seed), 400)
            else:
                assert "decode-1" in answer.error
        await until_back(mesh, "decode-1")


async def test_prompts_of_a_prefiller_that_loses_a_rank_are_answered_by_the_other(served_directory, expected):
    async with sharded(served_directory, "--prefill-tp", "2", KVMESH_CHUNK_TOKENS="16") as mesh:
        answers = [Answer(seed) for seed in range(6)]
        streams = [asyncio.create_task(stream(mesh, answer, 8, 400)) for answer in answers]
        await until_computing(mesh, "prefill-1")
        kill_rank(mesh, "prefill-1", 0)
        assert await until_fewer(mesh, "prefill", 2) < KNOWS_WITHIN_S
        await asyncio.gather(*streams)
        for answer in answers:
            assert (answer.error, answer.text) == (None, expected(prompt(400, answer.seed)))
        await mesh.until_line("kvmesh prefill-1: the executor ended with signal 9: rank 0 of 2")
        await until_back(mesh, "prefill-1")


class Answer:
    """What a stream said. `done`: it ended as it should."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.text = ""
        self.began = asyncio.Event()
        self.error: str | None = None
        self.done = False


async def stream(mesh, answer: Answer, max_tokens: int, length: int = 40) -> None:
    body = {"model": mesh.name, "prompt": prompt(length, answer.seed), "max_tokens": max_tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    async with mesh.http.stream("POST", mesh.url + "/v1/completions", json=body, timeout=30) as lines:
        async for line in lines.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = event["error"]["message"]
                else:
                    answer.text += event["choices"][0]["text"]
                    answer.began.set()


async def until_computing(mesh, name: str) -> None:
    """Until an instance has pages in use."""
    async with asyncio.timeout(10):
        while not await used_pages(mesh, name):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def used_pages(mesh, name: str) -> str:
    metrics = (await mesh.http.get(mesh.parts[name][0] + "/metrics")).text
    found = re.search(r'kvmesh_pages\{dp_rank="0",state="running"\} [1-9]', metrics)
    return found[0] if found else ""
