"""A mesh of separate processes over a broker with TLS and a user for each role, set up as the README says."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import httpx

from loadtest.otlp import receiver
from tests.broker import Broker
from tests.random_models import save_served

KEY_COMMAND = ["-m", "services.cli", "key", "me", "--file"]


async def run(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().strip()


@asynccontextmanager
async def part(kind: str, environ: dict[str, str], log: BinaryIO) -> AsyncIterator[str]:
    """The URL of a process that is ready; ended by SIGTERM. `log` takes what it says on standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{kind}"),
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        assert line.startswith(f"ready role={kind}"), line
        yield line.split("http=")[1].split()[0]
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0


class Guarded(NamedTuple):
    """A mesh whose broker knows a user for each role. `secrets`: the broker's passwords and the API key."""

    url: str
    key: str
    broker: Broker
    http: httpx.AsyncClient
    secrets: list[str]

    async def complete(self, key: str) -> httpx.Response:
        body = {"model": "model", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        return await self.http.post(f"{self.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})

    async def until_ready(self) -> None:
        async with asyncio.timeout(20):
            while (await self.http.get(f"{self.url}/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@asynccontextmanager
async def guarded(folder: Path, **environment: str) -> AsyncIterator[Guarded]:
    """Its parts' standard error goes to the file `log` in the folder."""
    save_served(folder / "model")
    made = folder / "credentials"
    await run("-m", "services.cli", "credentials", str(made), "--host", "127.0.0.1")
    key = await run(*KEY_COMMAND, str(folder / "keys"))
    secrets = [key]

    def told(role: str, broker: Broker) -> dict[str, str]:
        own = dict(line.split("=", 1) for line in (made / f"{role}.env").read_text().splitlines())
        secrets.append(own["KVMESH_NATS_PASSWORD"])
        return {**common, **own, "KVMESH_NATS_URL": f"tls://127.0.0.1:{broker.port}"}

    common = {
        "KVMESH_MODEL": str(folder / "model"),
        "KVMESH_PORT": "0",
        "KVMESH_THREADS": "1",
        "KVMESH_DRAIN_S": "1",
        "KVMESH_API_KEYS": str(folder / "keys"),
        **environment,
    }
    with Broker(made / "nats.conf") as broker, (folder / "log").open("ab") as log:
        async with AsyncExitStack() as stack:
            roles = ("router", "decode", "prefill")
            parts = [stack.enter_async_context(part(role, told(role, broker), log)) for role in roles]
            url, *_ = await asyncio.gather(*parts)
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
            mesh = Guarded(url, key, broker, http, secrets)
            await mesh.until_ready()
            yield mesh


async def test_roles_with_rights_serve(tmp_path: Path) -> None:
    async with guarded(tmp_path) as mesh:
        answer = await mesh.complete(mesh.key)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (await mesh.complete("nobody")).status_code == 401


async def test_no_secret_is_in_logs_traces_or_answers(tmp_path: Path) -> None:
    """Not where all is well, nor where a key is wrong, nor where the broker is away."""
    with receiver() as traces:
        async with guarded(tmp_path, KVMESH_LOG_LEVEL="debug", KVMESH_OTLP_ENDPOINT=traces.endpoint) as mesh:
            answers = [await mesh.complete(mesh.key), await mesh.complete(mesh.key[:-1])]
            mesh.broker.kill()
            answers.append(await mesh.complete(mesh.key))
            mesh.broker.start()
            await mesh.until_ready()
            answers.append(await mesh.complete(mesh.key))
        assert [answer.status_code for answer in answers] == [200, 401, 503, 200]
    log = (tmp_path / "log").read_text()
    assert " D " in log
    assert len(traces.all) > 10, "there is something to look at"
    shown = [log, repr(traces.all), *(f"{answer.headers} {answer.text}" for answer in answers)]
    for secret in [*mesh.secrets, mesh.key[:-1]]:
        assert len(secret) > 16
        assert not any(secret in text for text in shown)
