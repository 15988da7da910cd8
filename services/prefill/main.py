"""`kvmesh prefill`: one prefill instance."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from services.prefill.metrics import PrefillMetrics
from services.prefill.service import PrefillService
from shared import serving
from shared.config import PrefillSettings
from shared.instance import Instance


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM or Ctrl-C. Exit status 1, and one line, where something is wrong."""
    serving.main("prefill", PrefillSettings, _make, argv, max_batch=lambda settings: settings.max_queue)


def _make(
    instance: Instance, settings: PrefillSettings, registry: CollectorRegistry, tasks: asyncio.TaskGroup
) -> PrefillService:
    return PrefillService(instance, settings, PrefillMetrics(registry), tasks)
