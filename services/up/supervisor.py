"""`kvmesh up`: a whole mesh on this machine, one line a part, and one clear line when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from services.up.broker import Broker
from services.up.parts import Part, UpSettings, plan
from services.up.process import Process
from shared.errors import KvmeshError
from shared.models.source import resolve

RESTARTS = 5
"""A part that dies more often than this within `RESTART_WINDOW_S` is given up."""
RESTART_WINDOW_S = 60.0


class PartEnded(KvmeshError):
    """A part ended that should not have."""


def say(name: str, text: str) -> None:
    print(f"kvmesh  {name:<10} {text}", flush=True)


async def up(settings: UpSettings, stop: asyncio.Event) -> None:
    """Until `stop`. Raises `KvmeshError` where a part does not start, or (without `restart`) ends."""
    await asyncio.to_thread(resolve, settings.model)
    broker = Broker()
    try:
        await broker.start()
        say("broker", f"ready   {broker.url}")
        await _run(broker, settings, stop)
    finally:
        await asyncio.shield(broker.close())


async def _run(broker: Broker, settings: UpSettings, stop: asyncio.Event) -> None:
    told = {
        **os.environ,
        "KVMESH_MODEL": settings.model,
        "KVMESH_HOST": settings.host,
        "KVMESH_LOG_LEVEL": settings.log_level,
    }
    cores = len(os.sched_getaffinity(0))
    parts = [
        Supervised(part, {**told, **broker.told(part.kind)}, settings) for part in plan(settings, cores, os.environ)
    ]
    try:
        async with asyncio.TaskGroup() as watch:
            tasks = [
                watch.create_task(_keep(broker, settings)),
                watch.create_task(_announce_when_ready(broker, parts, settings)),
            ]
            tasks += [watch.create_task(part.run()) for part in parts]
            await stop.wait()
            for task in tasks:
                task.cancel()
    finally:
        say("up", "stopping")
        await asyncio.shield(_stop(parts, settings))


async def _keep(broker: Broker, settings: UpSettings) -> None:
    """Starts the broker again where that is wanted; raises `PartEnded` else."""
    while broker.process is not None:
        await broker.process.wait()
        how = broker.process.how_it_ended()
        if settings.restart == "no":
            raise PartEnded(f"the broker ended with {how}")
        say("broker", f"ended with {how}; starting it again")
        await broker.start()


async def _announce_when_ready(broker: Broker, parts: list[Supervised], settings: UpSettings) -> None:
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            for part in parts:
                await part.ready.wait()
            served = await _until_pairs(parts[0].url)
    except TimeoutError:
        late = ", ".join(part.name for part in parts if not part.ready.is_set()) or "a working pair"
        raise PartEnded(f"not ready within {settings.start_timeout_s:g} s: {late}") from None
    print(_try_it(parts[0].url, served, broker.env_file), flush=True)


async def _until_pairs(url: str) -> str:
    """Until the router says that it has a working pair; the name under which it serves the model."""
    from aiohttp import ClientError, ClientSession

    async with ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        break
            except ClientError:
                pass  # it is starting again: asked once more below
            await asyncio.sleep(0.1)
        async with session.get(f"{url}/v1/models") as answer:
            name: str = (await answer.json())["data"][0]["id"]
            return name


def _try_it(url: str, model: str, env_file: Path) -> str:
    body = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    return (
        f"\nThe mesh is ready. Try it:\n\n  curl -N {url}/v1/chat/completions "
        f"-H 'content-type: application/json' \\\n    -d '{json.dumps(body)}'\n\n"
        f"How well it is:\n\n  env $(cat {env_file}) {sys.executable} -m services.cli doctor\n\nCtrl-C stops it.\n"
    )


async def _stop(parts: list[Supervised], settings: UpSettings) -> None:
    """Fronts first, so that what runs can end; each kind together."""
    for kind in ("router", "decode", "prefill"):
        processes = [part.process for part in parts if part.part.kind == kind and part.process is not None]
        await asyncio.gather(*(process.stop(grace_s=settings.drain_s + 5) for process in processes))


class Supervised:
    """One part: started, watched, started again where that is wanted."""

    def __init__(self, part: Part, told: Mapping[str, str], settings: UpSettings) -> None:
        self.part = part
        self.name = part.name
        self.ready = asyncio.Event()
        self.url = ""
        self.process: Process | None = None
        self._environment = {**told, **part.environment}
        self._restart = settings.restart == "yes"
        self._ends: list[float] = []

    async def run(self) -> None:
        """Until cancelled. Raises `PartEnded`."""
        while True:
            self.process = await Process.start(self.name, self.part.argv, self._environment)
            fields = await self.process.ready_line()
            if fields is not None:
                self.url = fields.get("http", "")
                say(self.name, f"ready   {self.url}   pid {self.process.pid}")
                self.ready.set()
                await self.process.ready_line()
            await self.process.wait()
            self._on_end(fields is not None)

    def _on_end(self, was_ready: bool) -> None:
        assert self.process is not None
        how = self.process.how_it_ended()
        if not was_ready:
            raise PartEnded(f"{self.name} did not start: it ended with {how}")
        now = time.monotonic()
        self._ends = [at for at in self._ends if now - at < RESTART_WINDOW_S] + [now]
        if not self._restart or len(self._ends) > RESTARTS:
            raise PartEnded(f"{self.name} ended with {how}")
        say(self.name, f"ended with {how}; starting it again")
