"""`kvmesh up` under test: its lines, its parts' pids and URLs, requests to it, kills of its parts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

_PAGES = re.compile(r'kvmesh_pages\{dp_rank="\d+",state="(\w+)"\} (\S+)')
_READY = re.compile(r"kvmesh  (\S+) +ready   (\S+)(?:   pid (\d+))?")


class Failed(Exception):
    """The mesh answered with an error."""


class Up:
    """`lines` is what it printed so far; `parts` name → (URL, pid) of those that are ready."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient, name: str) -> None:
        self.process = process
        self.http = http
        self.name = name
        self.lines: list[str] = []
        self.ended = False
        self.parts: dict[str, tuple[str, int]] = {}
        self.starts: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode().rstrip()
            async with self._changed:
                self.lines.append(line)
                if match := _READY.match(line):
                    self.parts[match[1]] = (match[2], int(match[3] or 0))
                    self.starts[match[1]] = self.starts.get(match[1], 0) + 1
                self._changed.notify_all()
        async with self._changed:
            self.ended = True
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: condition() or self.ended)
            assert condition(), "it ended:\n" + "\n".join(self.lines)
        except TimeoutError:
            raise AssertionError("it did not say so:\n" + "\n".join(self.lines)) from None

    async def until_line(self, text: str, within_s: float = 60.0) -> None:
        await self.until(lambda: any(text in line for line in self.lines), within_s)

    @property
    def url(self) -> str:
        return self.parts["router"][0]

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", http_client=self.http, max_retries=0)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.parts[name][1], number)

    async def kill_and_wait(self, name: str) -> None:
        """kill -9, and until it is ready again."""
        before = self.starts[name]
        self.kill(name)
        await self.until(lambda: self.starts[name] > before)

    async def complete(self, prompt: list[int], **fields: Any) -> str:
        """The text of a greedy completion. Raises `Failed` where the answer is an error, in OpenAI's shape."""
        body = {"model": self.name, "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8}
        answer = await self.http.post(self.url + "/v1/completions", json={**body, **fields}, timeout=30)
        if answer.status_code != 200:
            raise Failed(answer.json()["error"]["message"])
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def held(self) -> dict[str, float]:
        """Name → pages that are not free, over all pools of each instance; asserts that their ledgers balance."""
        found = {}
        for name, (url, _) in self.parts.items():
            if name.startswith(("prefill", "decode")):
                integrity = await self.http.get(url + "/integrity")
                assert integrity.text == "balanced\n", f"{name}: {integrity.text}"
                metrics = (await self.http.get(url + "/metrics")).text
                found[name] = sum(float(pages) for state, pages in _PAGES.findall(metrics) if state != "free")
        return found

    async def until_idle(self, within_s: float = 10.0) -> None:
        """Until every page of every instance is free."""
        async with asyncio.timeout(within_s):
            while any((await self.held()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def up(model: Any, *flags: str, **environment: str) -> AsyncIterator[Up]:
    """Ready when entered; asserts that it ends well, and with all its parts, when left."""
    process = await start(model, *flags, **environment)
    async with httpx.AsyncClient() as http:
        mesh = Up(process, http, Path(model).name)
        reading = asyncio.create_task(mesh.read())
        try:
            await mesh.until_line("The mesh is ready")
            yield mesh
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            async with asyncio.timeout(40):
                await process.wait()
            await reading
    assert not [pid for _, pid in mesh.parts.values() if pid and _alive(pid)], "a part outlived the mesh"


async def start(model: Any, *flags: str, **environment: str) -> asyncio.subprocess.Process:
    told = {"KVMESH_PAGE_SIZE": "16", "KVMESH_KV_TOKENS": "4096", "KVMESH_THREADS": "1", "KVMESH_DRAIN_S": "5"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.up", "--model", str(model), "--port", "0", *flags),
        env={**os.environ, **told, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
