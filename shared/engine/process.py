"""A child process whose end is noticed at once, through a pidfd on the event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class ChildProcess:
    """Starts at construction. Must be made, used and closed on one running event loop."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        environ: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """`stdout`, `stderr`: as in `subprocess`, None inherits."""
        self._loop = asyncio.get_running_loop()
        self._popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, pass_fds=pass_fds, env=environ
        )
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def stdout(self) -> IO[bytes] | None:
        """The read end, where `stdout` was `subprocess.PIPE`; the caller's to close."""
        return self._popen.stdout

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """As in `subprocess`: negative is a signal; None while it runs."""
        return self._exited.result() if self._exited.done() else None

    @property
    def stopped(self) -> bool:
        """Whether it is held by SIGSTOP or its like: alive, and doing nothing."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    async def exited(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.shield(self._exited)

    async def end(self, grace_s: float) -> int:
        """Its exit status: by itself within `grace_s`, then by SIGTERM within as long again, then by SIGKILL."""
        for stop in (None, self._popen.terminate, self._popen.kill):
            if stop is not None and not self._exited.done():
                stop()
            try:
                async with asyncio.timeout(grace_s):
                    return await self.exited()
            except TimeoutError:
                continue
        return await self.exited()

    def kill(self) -> None:
        """SIGKILL, where it still runs."""
        if not self._exited.done():
            self._popen.kill()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set_result(self._popen.wait())
