"""`kvmesh prefill`: one prefill instance."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
from prometheus_client import CollectorRegistry

from services.prefill.metrics import PrefillMetrics
from services.prefill.service import PrefillService
from shared import config, lifecycle
from shared.errors import ConfigError
from shared.instance import Instance
from shared.serving import serve


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM or Ctrl-C. Exit status 1, and one line, where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = config.load(config.PrefillSettings, arguments, os.environ, prog="kvmesh prefill")
    except ConfigError as error:
        lifecycle.fail("prefill", error)
    settings = msgspec.structs.replace(settings, name=settings.name or "prefill")

    def make(instance: Instance, registry: CollectorRegistry, jobs: asyncio.TaskGroup) -> PrefillService:
        return PrefillService(instance, settings, PrefillMetrics(registry), jobs)

    async def run(stop: asyncio.Event) -> None:
        await serve("prefill", settings, stop, make, settings.max_queue)

    lifecycle.run(run, settings)
