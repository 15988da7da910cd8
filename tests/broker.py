"""A real broker of a test's own: `nats-server` on a free port of loopback, with a random token or a configuration."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_LISTENING = re.compile(rb"Listening for client connections on \S+:(\d+)")


class Broker:
    """Runs from entering to leaving; can be killed, stopped, and started again on the same port meanwhile."""

    def __init__(self, config: Path | None = None, *, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> None:
        """`config`: who may do what, instead of a token for everything. `inside`: what runs the command elsewhere."""
        self.host = host
        self._inside = inside
        self.token = "" if config else secrets.token_hex(16)
        self._access = ["-c", str(config)] if config else ["--auth", self.token]
        self.port = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Until it listens."""
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        command = [*self._inside, str(binary), "-a", self.host, "-p", str(self.port), *self._access]
        self._process = process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert process.stderr is not None
        said = b""
        for line in process.stderr:
            said += line
            if match := _LISTENING.search(line):
                self.port = int(match[1])
            if b"Server is ready" in line:
                break
        else:
            process.wait()
            raise RuntimeError(f"nats-server did not start: {said.decode(errors='replace')}")
        self._reader = threading.Thread(target=process.stderr.read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """kill -9, and gone when this returns. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._reader.join()
            assert process.stderr is not None
            process.stderr.close()

    def freeze(self) -> None:
        """It keeps its connections and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
