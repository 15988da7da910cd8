"""An aiohttp application on a socket: handlers are cancelled when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from shared.config import variable
from shared.errors import ConfigError
from shared.web.connection import Bounds, Connection, note_request

BOUNDS = Bounds()


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, shutdown_s: float = 1.0, bounds: Bounds = BOUNDS
) -> AsyncIterator[str]:
    """Serves `app` and gives its base URL. Port 0 is a free one; a port that cannot be had raises `ConfigError`.

    On leaving, the socket closes first, then requests that still run get `shutdown_s` and are cancelled.
    """
    app.middlewares.insert(0, note_request)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_s)
    await runner.setup()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    clients: set[Connection] = set()
    try:
        try:
            listener = await loop.create_server(
                lambda: Connection(server, loop, bounds, clients), host, port, backlog=128
            )
        except OSError as error:
            takes = f"a free port of {host} ({error.strerror or error})"
            raise ConfigError(variable("port"), port, takes) from None
        try:
            bound = listener.sockets[0].getsockname()[1]
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{bound}"
        finally:
            listener.close()
    finally:
        await runner.cleanup()
