"""The containers as an operator uses them: build the image, start the mesh, stream through the published port, scale under load,
kill a container, see it recover.

    python -m tests.compose.check [--keep]

Prints one line a step. Exit status 0 where all is well, 1 where it is not, 77 where no container engine can be had (and why).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
NO_ENGINE = 77
IMAGE = "kvmesh:check"
BASE = "debian:bookworm-slim"
WORKERS = 4
COMPOSE = ["docker", "compose", "-p", "kvmesh-check", "-f", str(ROOT / "compose" / "compose.yaml")]


class Wrong(Exception):
    """A step did not do what it must."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the mesh running at the end")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-compose-"))
    try:
        engine = engine_in(folder)
        check(folder, engine, keep=arguments.keep)
    except Wrong as error:
        sys.exit(f"compose: {error}")
    finally:
        if not arguments.keep:
            end(folder)


def engine_in(folder: Path) -> str:
    """The DOCKER_HOST of an engine; exits with `NO_ENGINE` where there is none."""
    made = subprocess.run(
        [str(ROOT / "tests/compose/engine.sh"), str(folder / "engine")], stdout=subprocess.PIPE, text=True, check=False
    )
    if made.returncode:
        raise SystemExit(made.returncode)
    return made.stdout.strip()


def check(folder: Path, engine: str, *, keep: bool) -> None:
    os.environ["DOCKER_HOST"] = engine
    step("base image", lambda: base_image(folder))
    step("image", lambda: build(folder))
    os.environ.update(settings(folder))
    try:
        step(
            "up",
            lambda: run([*COMPOSE, "up", "-d", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "120"]),
        )
        asyncio.run(steps())
    except BaseException:
        run([*COMPOSE, "logs", "--tail", "30"], shown=True)
        raise
    finally:
        if not keep:
            run([*COMPOSE, "down", "-v", "--timeout", "10"])


def step(name: str, do: Callable[[], object]) -> None:
    began = time.monotonic()
    do()
    say(name, began)


def say(name: str, began: float) -> None:
    print(f"compose: {name}: {time.monotonic() - began:.1f} s", flush=True)


def run(command: list[str], *, shown: bool = False) -> str:
    """Its output; raises `Wrong` with the end of it where it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, check=False)
    if shown:
        print(done.stdout, flush=True)
    if done.returncode:
        raise Wrong(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


# ---- the image


def base_image(folder: Path) -> None:
    """The Dockerfile's own base where a registry is reached, or one of the same packages under its name."""
    if not subprocess.run(["docker", "image", "inspect", BASE], capture_output=True, check=False).returncode:
        return
    if not subprocess.run(["docker", "pull", "-q", BASE], capture_output=True, check=False).returncode:
        return
    tar = folder / "base.tar"
    run(["mmdebstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", str(tar)])
    run(["docker", "import", str(tar), BASE])
    tar.unlink()


def build(folder: Path) -> None:
    """Where this machine trusts an authority of its own, pip in the build needs it too: as a secret, which no layer keeps."""
    secrets = []
    if authority := os.environ.get("PIP_CERT"):
        (folder / "pip.conf").write_text("[global]\ncert = /run/secrets/ca.pem\n")
        secrets = ["--secret", f"id=ca.pem,src={authority}", "--secret", f"id=pip.conf,src={folder / 'pip.conf'}"]
    run(["docker", "buildx", "build", "--load", "--build-arg", f"BASE_IMAGE={BASE}", *secrets, "-t", IMAGE, "."])


def settings(folder: Path) -> dict[str, str]:
    """A small random model, and a port of its own."""
    from tests.random_models import save_served

    models = folder / "models"
    save_served(models / "tiny")
    for path in [folder, *models.rglob("*"), models]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return {
        "KVMESH_IMAGE": IMAGE,
        "KVMESH_MODELS": str(models),
        "KVMESH_MODEL": "/models/tiny",
        "KVMESH_PUBLISH": f"127.0.0.1:{free_port()}",
        "KVMESH_PAGE_SIZE": "16",
        "KVMESH_KV_TOKENS": "4096",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# ---- what it must do


class Mesh:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.url = "http://" + os.environ["KVMESH_PUBLISH"]

    def body(self, seed: int, **fields: object) -> dict[str, object]:
        prompt = [(7 * i + seed) % 90 + 5 for i in range(120)]
        return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}

    async def complete(self, seed: int) -> str:
        answer = await self.http.post(self.url + "/v1/completions", json=self.body(seed))
        if answer.status_code != 200:
            raise Wrong(f"{answer.status_code} {answer.text}")
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def stream(self, seed: int) -> tuple[str, int]:
        """Text and number of chunks; `Wrong` where it does not end with [DONE]."""
        text, chunks, last = "", 0, ""
        body = self.body(seed, stream=True)
        async with self.http.stream("POST", self.url + "/v1/completions", json=body) as lines:
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Wrong(f"a stream ended with {event['error']['message']}")
                    text, chunks = text + event["choices"][0]["text"], chunks + 1
                last = line or last
        if last != "data: [DONE]":
            raise Wrong(f"a stream ended with {last!r}")
        return text, chunks

    async def ready(self, role: str) -> int:
        metrics = (await self.http.get(self.url + "/metrics")).text
        found = re.search(rf'kvmesh_instances\{{role="{role}",state="ready"\}} (\S+)', metrics)
        return int(float(found[1])) if found else 0

    async def until_ready(self, role: str, count: int, within_s: float) -> None:
        end = time.monotonic() + within_s
        while (now := await self.ready(role)) != count:
            if time.monotonic() > end:
                raise Wrong(f"{now} {role} instances are ready after {within_s:g} s, not {count}")
            await asyncio.sleep(0.1)

    async def until_silent(self) -> None:
        """No page is held any more; seen from inside, since instances publish nothing."""
        for name in containers("decode") + containers("prefill"):
            said = run(["docker", "exec", name, "python3", "-c", INTEGRITY])
            if said != "balanced\n":
                raise Wrong(f"{name}: {said}")


INTEGRITY = (
    "import socket, urllib.request as u;"
    "print(u.urlopen(f'http://{socket.gethostbyname(socket.gethostname())}:8000/integrity').read().decode(), end='')"
)


def containers(service: str) -> list[str]:
    return run([*COMPOSE, "ps", "-q", service]).split()


async def steps() -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        mesh = Mesh(http)
        began = time.monotonic()
        whole = {seed: await mesh.complete(seed) for seed in range(3)}
        text, chunks = await mesh.stream(0)
        if text != whole[0] or chunks < 10:
            raise Wrong(f"the stream said {text!r} in {chunks} chunks, the whole answer {whole[0]!r}")
        say("an answer, whole and streamed", began)
        await under_load(mesh, whole)
        await killed(mesh, whole)
        await mesh.until_silent()


async def under_load(mesh: Mesh, whole: dict[int, str]) -> None:
    """Scaled to three decoders and back to two: no request fails."""
    began = time.monotonic()
    async with load(mesh, whole) as answered:
        for count in (3, 2):
            await asyncio.to_thread(
                run,
                [*COMPOSE, "up", "-d", "--no-build", "--pull", "never", "--no-recreate", "--scale", f"decode={count}"],
            )
            await mesh.until_ready("decode", count, 60)
    say(f"decoders scaled to 3 and to 2 under load, {sum(answered)} answers, all right", began)


async def killed(mesh: Mesh, whole: dict[int, str]) -> None:
    """kill -9 of a decoder's container: its requests end clearly or are answered by the other, and it comes back."""
    began = time.monotonic()
    victim = containers("decode")[0]
    pid = int(run(["docker", "inspect", "-f", "{{.State.Pid}}", victim]))
    os.kill(pid, signal.SIGKILL)
    await mesh.until_ready("decode", 1, 10)
    noticed = time.monotonic() - began
    for seed, text in whole.items():
        if await mesh.complete(seed) != text:
            raise Wrong(f"a wrong answer with one decoder: prompt {seed}")
    await mesh.until_ready("decode", 2, 60)
    say(f"a decoder killed, noticed after {noticed:.1f} s, and back", began)


class load:
    """Workers that ask while the block runs; every answer must be right. Gives how many each got."""

    def __init__(self, mesh: Mesh, whole: dict[int, str]) -> None:
        self._mesh, self._whole = mesh, whole
        self._stop = asyncio.Event()
        self.answered = [0] * WORKERS

    async def __aenter__(self) -> list[int]:
        self._workers = [asyncio.create_task(self._work(number)) for number in range(WORKERS)]
        return self.answered

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._workers)

    async def _work(self, number: int) -> None:
        while not self._stop.is_set():
            seed = self.answered[number] % len(self._whole)
            text, _ = await self._mesh.stream(seed)
            if text != self._whole[seed]:
                raise Wrong(f"a wrong answer: prompt {seed}")
            self.answered[number] += 1


def end(folder: Path) -> None:
    """Stops the engine that was started here, and clears away what it had."""
    pid = folder / "engine" / "pid"
    if pid.exists():
        process = int(pid.read_text())
        os.kill(process, signal.SIGTERM)
        until = time.monotonic() + 20
        while Path(f"/proc/{process}").exists() and time.monotonic() < until:
            time.sleep(0.1)
        with (folder / "engine" / "iptables").open() as before:
            subprocess.run(["iptables-restore"], stdin=before, check=True)
        subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
