"""`kvmesh router`: one router."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.router.api import Api
from services.router.detokenize import Vocabulary
from services.router.dialects import SILENT, manner_of
from services.router.keys import Keyring, read_keys
from services.router.metrics import RouterMetrics
from services.router.model import ServedModel, load_tokenizer
from services.router.service import RouterService
from services.router.template import ChatTemplate
from shared import config, lifecycle, subjects
from shared.bus import Access, Bus
from shared.config import RouterSettings
from shared.errors import ConfigError
from shared.messages import InstanceRef, ModelIdentity
from shared.models.config import load_config
from shared.models.digest import model_digest
from shared.models.source import resolve
from shared.telemetry import traces
from shared.telemetry.metrics import new_registry
from shared.web.server import listening
from shared.whereabouts import settle

DRAIN_CANCELS_S = 1.0
"""How long a router that ends waits for its last cancels to go out."""


def main(argv: list[str] | None = None) -> None:
    """Runs until SIGTERM or Ctrl-C. Exit status 1, and one line, where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = settle(config.load(RouterSettings, arguments, os.environ, prog="kvmesh router"), "router")
    except ConfigError as error:
        lifecycle.fail("router", error)

    async def run(stop: asyncio.Event) -> None:
        traces.configure("kvmesh-router", settings.name, settings.otlp_endpoint)
        model = await load_model(settings)
        async with running(settings, model) as (service, url):
            ref = service.me
            print(f"ready role=router name={ref.name} incarnation={ref.incarnation:016x} http={url}", flush=True)
            await stop.wait()
            await drain(service)

    lifecycle.run(run, settings)


async def load_model(settings: RouterSettings) -> ServedModel:
    """Everything about the model but its weights. Raises `ModelError`."""
    path = await asyncio.to_thread(resolve, settings.model)
    model = load_config(path)
    tokenizer = load_tokenizer(path)
    template, tools, reasoning = ChatTemplate.load(path), settings.tool_parser, settings.reasoning_parser
    return ServedModel(
        name=settings.served_model or served_name(settings.model),
        identity=ModelIdentity(
            name=settings.model,
            digest=await asyncio.to_thread(model_digest, path),
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
        ),
        eos_token_ids=tuple(model.eos_ids),
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer),
        template=template,
        manner=SILENT if template is None else manner_of(template.source, tools=tools, reasoning=reasoning),
        created=int(time.time()),
    )


def served_name(model: str) -> str:
    """A hub id is its own name; a directory is known by its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else model


@asynccontextmanager
async def running(settings: RouterSettings, model: ServedModel) -> AsyncIterator[tuple[RouterService, str]]:
    """A router that serves: its service, and its base URL. On leaving, what still runs is cancelled and cleaned up. Where
    its watching fails, so does the block: a router that notices no failure must not go on."""
    me = InstanceRef(subjects.check_name("KVMESH_NAME", settings.name), secrets.randbits(64))
    metrics = RouterMetrics(new_registry())
    keys = Keyring(read_keys(settings.api_keys) if settings.api_keys else {}, time.monotonic)
    async with Bus.connect(Access.of(settings), name=me.name) as bus:
        service = RouterService(me, settings, bus, model, metrics)
        await service.start()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(service.run())
            try:
                async with listening(Api(service, keys).application(), settings.host, settings.port) as url:
                    yield service, url
            finally:
                await service.relay.courier.drained(DRAIN_CANCELS_S)
                watching.cancel()
                service.grammars.close()


async def drain(service: RouterService) -> None:
    """Takes nothing new, and gives what runs `drain_s` to end."""
    service.draining = True
    await service.relay.idle(service.settings.drain_s)
