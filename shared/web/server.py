"""An aiohttp application on a socket: handlers are cancelled when their client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from shared.config import variable
from shared.errors import ConfigError


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, *, shutdown_s: float = 1.0) -> AsyncIterator[str]:
    """Serves `app` and gives its base URL. Port 0 is a free one; a port that cannot be had raises `ConfigError`.

    On leaving, the socket closes first, then requests that still run get `shutdown_s` and are cancelled.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            takes = f"a free port of {host} ({error.strerror or error})"
            raise ConfigError(variable("port"), port, takes) from None
        bound = runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{bound}"
    finally:
        await runner.cleanup()
