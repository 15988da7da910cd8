"""Work that comes in while a process ends."""

from __future__ import annotations

import asyncio

from shared.lifecycle import spawn


async def test_it_runs_in_the_group() -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()

    async with asyncio.TaskGroup() as tasks:
        spawn(tasks, work())
    assert done.is_set()


async def test_what_comes_when_the_group_has_ended_is_let_go() -> None:
    async def work() -> None:
        raise AssertionError("it runs")

    async with asyncio.TaskGroup() as tasks:
        pass
    spawn(tasks, work())
