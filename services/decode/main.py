"""`kvmesh decode`: one decode instance."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics
from services.decode.service import DecodeService
from shared import config, lifecycle
from shared.errors import ConfigError
from shared.instance import Instance
from shared.serving import serve


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM or Ctrl-C. Exit status 1, and one line, where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = config.load(config.DecodeSettings, arguments, os.environ, prog="kvmesh decode")
    except ConfigError as error:
        lifecycle.fail("decode", error)
    settings = msgspec.structs.replace(settings, name=settings.name or "decode")

    def make(instance: Instance, registry: CollectorRegistry, jobs: asyncio.TaskGroup) -> DecodeService:
        return DecodeService(instance, settings, DecodeMetrics(registry), jobs)

    async def run(stop: asyncio.Event) -> None:
        await serve("decode", settings, stop, make, settings.max_batch)

    lifecycle.run(run, settings)
