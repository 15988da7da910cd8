"""How a prefill or decode process lives: open everything, announce, serve until told to stop, drain, leave."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Protocol, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry

from shared import config, lifecycle
from shared.config import InstanceSettings
from shared.errors import BusError, ConfigError, FabricUnavailable
from shared.instance import Announcer, Instance
from shared.messages import Load, Role
from shared.opening import open_instance
from shared.telemetry import traces
from shared.telemetry.metrics import LedgerCollector, LoadCollector, new_registry
from shared.web.health import Readiness, add_health
from shared.web.server import listening
from shared.whereabouts import settle


class Service(Protocol):
    """What a service brings: see `services.prefill.service` and `services.decode.service`."""

    def load(self) -> Load: ...
    def check_integrity(self) -> None: ...
    async def run(self, listening: asyncio.Event) -> None: ...
    async def drain(self, grace_s: float) -> None: ...
    def close(self) -> None: ...


S = TypeVar("S", bound=InstanceSettings)

FABRIC_LOOK_S = 1.0
"""Seconds between two looks at whether the fabric's provider hangs."""

MakeService = Callable[[Instance, S, CollectorRegistry, asyncio.TaskGroup], Service]


def main(
    role: Role,
    kind: type[S],
    make: MakeService[S],
    argv: list[str] | None,
    *,
    max_batch: Callable[[S], int],
) -> None:
    """A whole process: settings, signals, service. Exit status 1, and one line, where something is wrong."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        settings = settle(config.load(kind, arguments, os.environ, prog=f"kvmesh {role}"), role)
    except ConfigError as error:
        lifecycle.fail(role, error)

    async def run(stop: asyncio.Event) -> None:
        await serve(role, settings, stop, make, max_batch(settings))

    lifecycle.run(run, settings)


async def serve(role: Role, settings: S, stop: asyncio.Event, make: MakeService[S], max_batch: int) -> None:
    """Until `stop`, then drains. Raises `KvmeshError`, in a group, where something it cannot live without fails."""
    traces.configure(f"kvmesh-{role}", settings.name, settings.otlp_endpoint)
    async with AsyncExitStack() as stack:
        instance = await stack.enter_async_context(open_instance(role, settings))
        ledgers = [pool.counts for pool in instance.pools]
        registry = new_registry(LedgerCollector(ledgers, instance.layout.page_size))
        try:
            async with asyncio.TaskGroup() as tasks:
                service = make(instance, settings, registry, tasks)
                stack.callback(service.close)
                registry.register(LoadCollector(service.load, max_batch))
                app = app_with_health(service, registry)
                url = await stack.enter_async_context(listening(app, settings.host, settings.port))
                announcer = Announcer(instance, service.load, max_batch=max_batch, http=url)
                stack.push_async_callback(_say_left, instance, announcer)
                taking = asyncio.Event()
                tasks.create_task(service.run(taking))
                await taking.wait()
                tasks.create_task(announcer.run())
                tasks.create_task(_watch_executor(instance))
                tasks.create_task(_watch_fabric(instance))
                print_ready(instance, url)
                await stop.wait()
                await announcer.change("draining")
                await service.drain(settings.drain_s)
                raise _Stopped
        except* _Stopped:
            pass


class _Stopped(Exception):
    """Ends the task group: what still runs has nothing left to do."""


def app_with_health(service: Service, registry: CollectorRegistry) -> web.Application:
    """/health, /ready, /metrics, and /integrity, which says 500 where the ledger does not balance."""

    async def integrity(_: web.Request) -> web.Response:
        try:
            service.check_integrity()
        except AssertionError as error:
            return web.Response(status=500, text=f"{error}\n")
        return web.Response(text="balanced\n")

    app = web.Application()
    add_health(app, Readiness, registry)
    app.router.add_get("/integrity", integrity)
    return app


def print_ready(instance: Instance, url: str) -> None:
    """One line on stdout: what whoever started this process waits for."""
    fields = f"role={instance.role} name={instance.ref.name} incarnation={instance.ref.incarnation:016x}"
    print(f"ready {fields} http={url} fabric={instance.fabric.provider}", flush=True)


async def _watch_executor(instance: Instance) -> None:
    """Raises `ExecutorDied` as soon as the executor is no more, also while nothing runs."""
    await instance.executor.died()


async def _watch_fabric(instance: Instance) -> None:
    """Raises `FabricUnavailable` where the provider hangs: the process is of no use then, and another one is."""
    while True:
        await asyncio.sleep(FABRIC_LOOK_S)
        if instance.fabric.stuck:
            raise FabricUnavailable(f"the provider {instance.fabric.provider} hangs")


async def _say_left(instance: Instance, announcer: Announcer) -> None:
    await announcer.change("left")
    with suppress(BusError):
        await instance.bus.flush(0.5)
