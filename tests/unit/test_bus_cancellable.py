"""A cancellation that comes in the moment of the answer comes out."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus import cancellable
from shared.errors import BusError
from shared.messages import Accepted


async def dropping(answer: asyncio.Future[Accepted]) -> Accepted:
    """Drops a cancellation that comes together with the answer, as `wait_for` does on Python 3.11."""
    try:
        return await answer
    except asyncio.CancelledError:
        if answer.done() and not answer.cancelled():
            return answer.result()
        raise


async def asking(answer: asyncio.Future[Accepted]) -> asyncio.Task[Accepted]:
    task = asyncio.ensure_future(cancellable(dropping(answer)))
    await asyncio.sleep(0)
    return task


def new_answer() -> asyncio.Future[Accepted]:
    return asyncio.get_running_loop().create_future()


async def test_an_answer_comes_through() -> None:
    answer = new_answer()
    task = await asking(answer)
    answer.set_result(Accepted("a"))
    assert await task == Accepted("a")


async def test_a_cancellation_in_the_moment_of_the_answer_is_not_lost() -> None:
    answer = new_answer()
    task = await asking(answer)
    answer.set_result(Accepted("a"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nor_is_it_turned_into_an_error() -> None:
    answer = new_answer()
    task = await asking(answer)
    answer.set_exception(BusError("away"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_around_it_still_sees_its_own_cancellation() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cancellable(dropping(new_answer()))
