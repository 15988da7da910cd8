"""The same contract against a second libfabric: 2.5.1, which the PyPI wheel `mpich` carries. The wheel is fetched once
into the cache folder; a machine that cannot have it skips, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shared.transfer.fabric import library_version

WHEEL = "mpich==5.0.2"
EXPECTED = "2.5"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvmesh" / "libfabric-2.5.1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library_version() == EXPECTED, reason="this is the run against the second libfabric"),
]


def fetch(into: Path) -> Path:
    """The folder with the wheel's libfabric.so.1."""
    found = [*into.rglob("libfabric.so.1")]
    if not found:
        into.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode != 0:
            pytest.skip(f"{WHEEL} cannot be had: {result.stderr.strip().splitlines()[-1:]}")
        [wheel] = into.glob("mpich-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
        wheel.unlink()
        found = [*into.rglob("libfabric.so.1")]
    return found[0].parent


def test_the_contract_holds_on_libfabric_2() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fetch(CACHE))}
    asked = [sys.executable, "-c", "from shared.transfer.fabric import library_version; print(library_version())"]
    version = subprocess.run(asked, env=environment, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert version.stdout.strip() == EXPECTED
    suite = sorted(str(path) for path in Path(__file__).parent.glob("test_fabric_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite]
    result = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=170, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
