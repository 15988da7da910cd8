"""`kvmesh key NAME --file FILE`: a new API key. The file gets its digest, the terminal the key, which is nowhere else."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

import msgspec

from services.router.keys import KeyEntry, KeyFile, digest, read_keys
from shared import lifecycle
from shared.errors import ConfigError
from shared.subjects import check_name


def main(argv: list[str]) -> None:
    """Exit status 1, and one line, where something is wrong; the file is unchanged then."""
    parser = argparse.ArgumentParser(prog="kvmesh key", description="Make an API key for KVMESH_API_KEYS.")
    parser.add_argument("name", help="whose key it is; appears in metrics and errors of the router's operator")
    parser.add_argument("--file", required=True, type=Path, help="file of keys; made where there is none")
    parser.add_argument("--max-concurrent", type=int, help="requests at once [no limit]")
    parser.add_argument("--tokens-per-minute", type=int, help="prompt and output tokens, on average [no limit]")
    asked = parser.parse_args(argv)
    try:
        key = add(asked.file, asked.name, asked.max_concurrent, asked.tokens_per_minute)
    except ConfigError as error:
        lifecycle.fail("key", error)
    print(key)
    print(f"{asked.file} has its digest; routers read it at start (KVMESH_API_KEYS={asked.file})", file=sys.stderr)


def add(file: Path, name: str, max_concurrent: int | None, tokens_per_minute: int | None) -> str:
    """Adds a key to `file`, which only its owner can read, and returns it. Raises `ConfigError`."""
    keys = read_keys(str(file)) if file.exists() else {}
    if name in keys:
        raise ConfigError("name", name, f"a name that {file} does not have yet")
    check_name("name", name)
    key = "kvm-" + secrets.token_urlsafe(32)
    limits = {"--max-concurrent": max_concurrent, "--tokens-per-minute": tokens_per_minute}
    for flag, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(flag, limit, "a whole number of at least 1")
    entry = KeyEntry(sha256=digest(key), max_concurrent=max_concurrent, tokens_per_minute=tokens_per_minute)
    _write(file, KeyFile({**keys, name: entry}))
    return key


def _write(file: Path, content: KeyFile) -> None:
    """Whole or not at all."""
    beside = file.with_name(file.name + ".new")
    lines = ["# API keys of a kvmesh router: digests and limits. `kvmesh key` adds one.\n"]
    for name, entry in content.keys.items():
        fields = msgspec.to_builtins(entry)
        lines += [
            f"\n[keys.{name}]\n",
            *(f"{field} = {msgspec.json.encode(v).decode()}\n" for field, v in fields.items()),
        ]
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.writelines(lines)
    beside.replace(file)
