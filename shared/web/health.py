"""/health, /ready and /metrics: the same three for every service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


class Readiness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What /ready says. `reason` is None exactly where the service is ready; `detail` is for people."""

    reason: str | None = None
    detail: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        return self.reason is None


def add_health(app: web.Application, readiness: Callable[[], Readiness], metrics: CollectorRegistry) -> None:
    """/health answers 200 while the process runs; /ready answers 200, or 503 with the reason; /metrics is Prometheus text."""

    async def health(_request: web.Request) -> web.Response:
        return _json(200, {"status": "alive"})

    async def ready(_request: web.Request) -> web.Response:
        now = readiness()
        if now.ready:
            return _json(200, {"status": "ready", **now.detail})
        return _json(503, {"status": "not ready", "reason": now.reason, **now.detail}, {"Retry-After": "1"})

    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", scrape)


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), headers=headers, content_type="application/json")
