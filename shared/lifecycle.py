"""How a process starts and ends: logging, uvloop, signals, one line for an error that stops it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import uvloop

from shared.config import Settings
from shared.errors import KvmeshError
from shared.telemetry import traces

log = logging.getLogger(__name__)

Main = Callable[[asyncio.Event], Awaitable[None]]

_PR_SET_PDEATHSIG = 1


def run(main: Main, settings: Settings) -> None:
    """Runs `main(stop)` to its end; SIGTERM and SIGINT set `stop`, a second one ends the process at once.

    A `KvmeshError` out of `main` (alone or in a group) is printed as one line and ends the process with status 1.
    """
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname).1s {settings.name} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("nats").setLevel(logging.ERROR)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    gc.freeze()
    try:
        uvloop.run(_until_stopped(main))
    except KvmeshError as error:
        fail(settings.name, error)
    except BaseExceptionGroup as group:
        known, rest = group.split(KvmeshError)
        if known is None or rest is not None:
            raise
        fail(settings.name, first(known))
    finally:
        traces.shutdown()


def spawn(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` in the group, or not at all where the group takes nothing any more: its process is ending, and what still
    comes in from outside comes too late."""
    try:
        tasks.create_task(work)
    except RuntimeError:
        work.close()


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def fail(name: str, error: BaseException) -> NoReturn:
    """One line on stderr, exit status 1."""
    print(f"kvmesh {name}: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1)


async def _until_stopped(main: Main) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await main(stop)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the parent process ends: a killed supervisor must leave no orphans. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)
