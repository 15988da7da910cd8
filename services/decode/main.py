"""`kvmesh decode`: one decode instance."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics
from services.decode.service import DecodeService
from shared import serving
from shared.config import DecodeSettings
from shared.instance import Instance


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM or Ctrl-C. Exit status 1, and one line, where something is wrong."""
    serving.main("decode", DecodeSettings, _make, argv, max_batch=lambda settings: settings.max_batch * settings.dp)


def _make(
    instance: Instance, settings: DecodeSettings, registry: CollectorRegistry, tasks: asyncio.TaskGroup
) -> DecodeService:
    return DecodeService(instance, settings, DecodeMetrics(registry), tasks)
