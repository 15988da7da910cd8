"""A local mesh for a benchmark: `kvmesh up` in a process of its own, on a free port, with its output kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_READY = re.compile(r"kvmesh  (\S+) +ready   (\S+)(?:   pid (\d+))?")


class LocalMesh:
    """`urls`: name of each part → its base URL; `pids`: its process id."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.urls: dict[str, str] = {}
        self.pids: dict[str, int] = {}

    @property
    def url(self) -> str:
        return self.urls["router"]


@contextmanager
def local_mesh(
    *flags: str, environment: Mapping[str, str] | None = None, timeout_s: float = 300.0
) -> Iterator[LocalMesh]:
    """Until it is ready; ended with the block. Raises `RuntimeError` with its output where it does not start."""
    argv = [sys.executable, "-m", "services.up", "--port", "0", *flags]
    process = subprocess.Popen(
        argv, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    mesh = LocalMesh(process)
    try:
        _wait_ready(mesh, time.monotonic() + timeout_s)
        yield mesh
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_ready(mesh: LocalMesh, deadline: float) -> None:
    assert mesh.process.stdout is not None
    said = []
    for line in mesh.process.stdout:
        said.append(line)
        if match := _READY.match(line):
            mesh.urls[match[1]] = match[2]
            mesh.pids[match[1]] = int(match[3] or 0)
        if "The mesh is ready" in line:
            return
        if time.monotonic() > deadline:
            break
    raise RuntimeError("the mesh did not start:\n" + "".join(said))
