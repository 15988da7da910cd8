"""The mesh under the same load, over HTTP: one prefiller on one core, one decoder on the other."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import aiohttp

from loadtest.interference.load import Heard, Load
from loadtest.local import LocalMesh

MOST = 4096


def pin(mesh: LocalMesh, prefill: int, decode: int) -> None:
    """Each instance with its executors on a core of its own; router and broker, which both sides' work goes through, are left to
    the scheduler."""
    for name, core in (("prefill", prefill), ("decode", decode)):
        for pid in _family(mesh.pids[name]):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]


def run(mesh: LocalMesh, model: str, load: Load) -> Heard:
    return asyncio.run(_run(mesh.url + "/v1/completions", model, load))


async def _run(url: str, model: str, load: Load) -> Heard:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        streams: list[list[float]] = [[] for _ in range(load.streams)]
        tasks = [
            asyncio.create_task(_ask(session, url, model, load.stream_prompt(i), MOST, times))
            for i, times in enumerate(streams)
        ]
        while not all(streams):  # noqa: ASYNC110 - a benchmark may look
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        for times in streams:
            times[:] = [began]
        arrivals = load.arrivals()
        answers: list[list[float]] = [[] for _ in arrivals]
        asking = []
        for i, at in enumerate(arrivals):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            asking.append(
                asyncio.create_task(_ask(session, url, model, load.prompt(i), load.output_tokens, answers[i]))
            )
        await asyncio.sleep(max(0.0, began + load.seconds - time.perf_counter()))
        end = time.perf_counter()
        for task in (*tasks, *asking):
            task.cancel()
        await asyncio.gather(*tasks, *asking, return_exceptions=True)
    ended = [(at, times) for at, times in zip(arrivals, answers, strict=True) if len(times) >= load.output_tokens]
    return Heard(
        [[at - began for at in times if at <= end] for times in streams],
        [at for at, _ in ended],
        [times[0] - began for _, times in ended],
        [times[-1] - began for _, times in ended],
    )


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], most: int, times: list[float]
) -> None:
    """When each token of the answer came."""
    body = {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the mesh answered {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"a stream ended with {event['error']['message']}")
                times += [now] * sum(len(choice.get("token_ids") or []) for choice in event["choices"])
