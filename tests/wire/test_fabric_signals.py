"""Loading libfabric must not take over the process's signals (Debian's build links a library that does)."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

DIE = "import shared.transfer._native, os, sys; os.kill(os.getpid(), int(sys.argv[1]))"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV])
def test_a_signal_ends_the_process_as_that_signal(number, tmp_path):
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", DIE, str(int(number))], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == -number
    assert list(tmp_path.glob("*.btr")) == []
