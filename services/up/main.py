"""`kvmesh up`."""

from __future__ import annotations

import asyncio
import os
import sys

from services.up.parts import UpSettings
from services.up.supervisor import up
from shared import config, lifecycle
from shared.errors import ConfigError


def main(argv: list[str] | None = None) -> None:
    """Runs a local mesh until Ctrl-C. Exit status 1, and one line, where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = config.load(UpSettings, arguments, os.environ, prog="kvmesh up")
    except ConfigError as error:
        lifecycle.fail("up", error)

    async def run(stop: asyncio.Event) -> None:
        await up(settings, stop)

    lifecycle.run(run, settings)
