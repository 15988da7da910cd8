"""A child process that cannot outlive its parent."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping

from shared.lifecycle import die_with_parent


class Process:
    """Started in a session of its own, so that a Ctrl-C on the terminal reaches only the parent."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, argv: list[str], environment: Mapping[str, str], *, quiet: bool = False) -> Process:
        """`quiet`: its output is dropped; otherwise its stdout is read by `ready_line` and its stderr is ours."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(environment),
            stdin=DEVNULL,
            stdout=DEVNULL if quiet else PIPE,
            stderr=DEVNULL if quiet else None,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def ready_line(self) -> dict[str, str] | None:
        """The fields of its line `ready key=value ...`; None where its output ended without one."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            words = line.decode(errors="replace").split()
            if words[:1] == ["ready"]:
                return dict(word.split("=", 1) for word in words[1:] if "=" in word)
        return None

    async def wait(self) -> int:
        return await self._process.wait()

    def how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None:
            return "it is running"
        return f"status {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`. Idempotent."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
