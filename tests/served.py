"""A whole mesh in one process as a client sees it: the real router's HTTP, a real prefiller and decoder with a model in
executor processes, over a real broker and libfabric."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from services.router.main import load_model, running
from services.router.service import RouterService
from shared.config import RouterSettings
from tests.inproc import ModelEngine, Node, mesh, real_fabric

PAGE = 4


class Served:
    def __init__(self, url: str, service: RouterService, session: aiohttp.ClientSession, nodes: list[Node]) -> None:
        self.url, self.service, self.session, self.nodes = url, service, session, nodes

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.read(), response.headers


@asynccontextmanager
async def served(directory: Path, *, decode_pages: int = 512, **decode: Any) -> AsyncIterator[Served]:
    """Ledgers are checked, and everything is free, at the end."""
    model = await load_model(RouterSettings(name="router", model=str(directory), served_model="tiny"))
    engine = ModelEngine(directory, page_size=PAGE)
    engine.identity = model.identity
    async with mesh(real_fabric, engine) as nodes, aiohttp.ClientSession() as session:
        told = nodes.broker.told("router")
        settings = RouterSettings(
            name="router",
            nats_url=told["KVMESH_NATS_URL"],
            nats_user=told["KVMESH_NATS_USER"],
            nats_password=told["KVMESH_NATS_PASSWORD"],
            port=0,
            request_timeout_s=60.0,
        )
        both = [await nodes.prefiller(pages=256), await nodes.decoder(pages=decode_pages, **decode)]
        async with running(settings, model) as (service, url):
            async with asyncio.timeout(10.0):
                while service.registry.missing() is not None:  # noqa: ASYNC110 - nothing outside tells of it
                    await asyncio.sleep(0.01)
            yield Served(url, service, session, both)
        for node in both:
            await node.until_idle()
