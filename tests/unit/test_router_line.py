"""The line at the router: first come, first served; bounded in length and time; no place is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from services.router.dispatch import NoPair, NoRoom
from services.router.line import Line, Pace
from shared.errors import Refused


class Rooms:
    """So many places; the line's two sides of it."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.served: list[str] = []
        self.undone: list[str] = []
        self.gone = False
        self.personal: set[str] = set()

    def offer(self, who: str) -> str | NoRoom | NoPair:
        if self.gone:
            return NoPair("nobody is there")
        if who in self.personal:
            return NoRoom("avoids", personal=True)
        if not self.free:
            return NoRoom("busy", personal=False)
        self.free -= 1
        self.served.append(who)
        return who

    def undo(self, place: str) -> None:
        self.free += 1
        self.undone.append(place)

    def line(self, *, max_length: int = 10) -> Line[str, str]:
        return Line(self.offer, self.undo, max_length=max_length)


def soon() -> float:
    return asyncio.get_running_loop().time() + 5.0


async def waiting(line: Line[str, str], *names: str, again: bool = False) -> list[asyncio.Task[str]]:
    """A task for each, in line in this order."""
    tasks = []
    for name in names:
        before = len(line)
        tasks.append(asyncio.create_task(line.wait(name, soon(), again=again)))
        await until(lambda: len(line) > before)  # noqa: B023
    return tasks


async def until(what: Callable[[], bool]) -> None:
    """Lets others run until it holds."""
    async with asyncio.timeout(5.0):
        while not what():  # noqa: ASYNC110  (a line does not tell who waits in it)
            await asyncio.sleep(0)


async def test_room_is_given_at_once_even_where_nobody_may_wait() -> None:
    rooms = Rooms(1)
    line = rooms.line(max_length=0)
    assert await line.wait("a", soon()) == "a"
    with pytest.raises(Refused, match="busy") as raised:
        await line.wait("b", soon())
    assert raised.value.status == 429
    assert len(line) == 0


async def test_first_come_first_served() -> None:
    rooms = Rooms()
    line = rooms.line()
    tasks = await waiting(line, *"abc")
    for _ in range(3):
        rooms.free += 1
        line.kick()
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]
    assert rooms.served == ["a", "b", "c"]


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    rooms = Rooms()
    line = rooms.line()
    (first,) = await waiting(line, "first")
    rooms.free = 1
    second = asyncio.create_task(line.wait("second", soon()))
    assert await first == "first"
    assert rooms.served == ["first"]
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert len(line) == 0


async def test_one_that_waits_for_something_of_its_own_lets_others_pass() -> None:
    rooms = Rooms()
    rooms.personal = {"a"}
    line = rooms.line()
    a, b = await waiting(line, "a", "b")
    rooms.free = 1
    line.kick()
    assert await b == "b"
    rooms.personal, rooms.free = set(), 1
    line.kick()
    assert await a == "a"


async def test_one_that_was_here_before_goes_to_the_front() -> None:
    rooms = Rooms()
    line = rooms.line(max_length=1)
    (a,) = await waiting(line, "a")
    (again,) = await waiting(line, "again", again=True)
    rooms.free = 1
    line.kick()
    assert await again == "again"
    assert not a.done()
    a.cancel()
    await asyncio.gather(a, return_exceptions=True)


async def test_a_full_line_refuses_with_a_hint() -> None:
    rooms = Rooms()
    line = rooms.line(max_length=2)
    tasks = await waiting(line, "a", "b")
    with pytest.raises(Refused, match="2 requests wait") as raised:
        await line.wait("c", soon())
    assert raised.value.retry_after_s >= 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_wait_that_is_too_long_ends_in_429() -> None:
    rooms = Rooms()
    line = rooms.line()
    with pytest.raises(Refused, match="stayed busy") as raised:
        await line.wait("a", asyncio.get_running_loop().time() + 0.01)
    assert raised.value.status == 429
    assert len(line) == 0


async def test_nobody_to_wait_for_is_503_at_once_for_all() -> None:
    rooms = Rooms()
    line = rooms.line()
    tasks = await waiting(line, "a", "b")
    rooms.gone = True
    line.kick()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, Refused)
        assert (error.status, error.reason) == (503, "nobody is there")


async def test_a_waiter_that_leaves_is_out_of_line() -> None:
    rooms = Rooms()
    line = rooms.line()
    a, b = await waiting(line, "a", "b")
    a.cancel()
    await asyncio.gather(a, return_exceptions=True)
    rooms.free = 1
    line.kick()
    assert await b == "b"
    assert rooms.served == ["b"]


async def test_a_place_given_in_the_moment_its_waiter_leaves_is_given_back() -> None:
    rooms = Rooms()
    line = rooms.line()
    (a,) = await waiting(line, "a")
    rooms.free = 1
    line.kick()
    a.cancel()
    with pytest.raises(asyncio.CancelledError):
        await a
    assert rooms.undone == ["a"]
    assert rooms.free == 1


async def test_a_line_that_is_known_to_be_too_slow_refuses_at_once() -> None:
    rooms = Rooms()
    line = rooms.line()
    for second in range(20):
        line.pace.departed(float(second))
    tasks = await waiting(line, *"abcd")
    with pytest.raises(Refused, match="would be about 5 s") as raised:
        await line.wait("e", asyncio.get_running_loop().time() + 3.0)
    assert raised.value.status == 429
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_the_pace_is_known_after_some_departures_of_a_busy_time() -> None:
    pace = Pace()
    for i in range(5):
        pace.departed(i * 0.5)
    assert pace.wait_s(4) is None
    pace.idle()
    for i in range(10):
        pace.departed(100 + i * 0.5)
    assert pace.wait_s(4) == pytest.approx(2.0)


async def test_many_come_and_go_and_every_place_is_accounted_for() -> None:
    rooms = Rooms(3)
    line = rooms.line(max_length=1000)

    async def one(name: str) -> None:
        place = await line.wait(name, soon())
        try:
            await asyncio.sleep(0)
        finally:
            rooms.free += 1
            line.kick()
        assert place == name

    tasks = [asyncio.create_task(one(str(i))) for i in range(300)]
    for i, task in enumerate(tasks):
        if i % 3 == 0:
            await asyncio.sleep(0)
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert rooms.free == 3
    assert len(line) == 0
