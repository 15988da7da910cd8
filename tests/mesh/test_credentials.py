"""A mesh of separate processes over a broker with TLS and a user for each role, set up as the README says."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from tests.broker import Broker
from tests.random_models import save_served

KEY_COMMAND = ["-m", "services.cli", "key", "me", "--file"]


async def run(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().strip()


@asynccontextmanager
async def part(kind: str, environ: dict[str, str]) -> AsyncIterator[str]:
    """The URL of a process that is ready; ended by SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{kind}", env={**os.environ, **environ}, stdout=asyncio.subprocess.PIPE
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


async def test_roles_with_rights_serve(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_served(model)
    made = tmp_path / "credentials"
    await run("-m", "services.cli", "credentials", str(made), "--host", "127.0.0.1")
    key = await run(*KEY_COMMAND, str(tmp_path / "keys"))
    with Broker(made / "nats.conf") as broker:
        common = {"KVMESH_MODEL": str(model), "KVMESH_PORT": "0", "KVMESH_THREADS": "1", "KVMESH_DRAIN_S": "1"}
        common["KVMESH_API_KEYS"] = str(tmp_path / "keys")

        def told(role: str) -> dict[str, str]:
            lines = (made / f"{role}.env").read_text().splitlines()
            return {**common, **dict(line.split("=", 1) for line in lines), "KVMESH_NATS_URL": tls}

        tls = f"tls://127.0.0.1:{broker.port}"
        async with AsyncExitStack() as stack:
            parts = [stack.enter_async_context(part(role, told(role))) for role in ("router", "decode", "prefill")]
            url, *_ = await asyncio.gather(*parts)
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
            async with asyncio.timeout(20):
                while (await http.get(f"{url}/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            body = {"model": "model", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
            answer = await http.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert (await http.post(f"{url}/v1/completions", json=body)).status_code == 401
