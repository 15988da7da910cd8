"""A cancellation that comes in the moment of the answer comes out."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.router.asking import ask
from shared.bus import Bus
from shared.errors import BusError
from shared.messages import Accepted


class Answering:
    """A bus whose client drops a cancellation that comes together with the answer, as `wait_for` does on Python 3.11."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()

    async def request(self, *_: Any, timeout_s: float) -> Accepted:
        try:
            return await self.answer
        except asyncio.CancelledError:
            if self.answer.done() and not self.answer.cancelled():
                return self.answer.result()
            raise


async def asking(bus: Answering) -> asyncio.Task[Accepted]:
    task = asyncio.create_task(ask(cast(Bus, bus), "s", Accepted("a"), Accepted, timeout_s=1.0))
    await asyncio.sleep(0)
    return task


async def test_an_answer_comes_through() -> None:
    bus = Answering()
    task = await asking(bus)
    bus.answer.set_result(Accepted("a"))
    assert await task == Accepted("a")


async def test_a_cancellation_in_the_moment_of_the_answer_is_not_lost() -> None:
    bus = Answering()
    task = await asking(bus)
    bus.answer.set_result(Accepted("a"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nor_is_it_turned_into_an_error() -> None:
    bus = Answering()
    task = await asking(bus)
    bus.answer.set_exception(BusError("away"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_around_it_still_sees_its_own_cancellation() -> None:
    bus = Answering()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ask(cast(Bus, bus), "s", Accepted("a"), Accepted, timeout_s=1.0)
