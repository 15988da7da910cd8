"""Cancels arrive, in order, each once; a broker that is away delays them only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from services.router.courier import Courier
from shared.bus import Bus
from shared.errors import BusError
from shared.messages import CancelGenerate, InstanceRef

D0, D1 = InstanceRef("d0", 1), InstanceRef("d1", 2)


class Post:
    """A bus that keeps what is published, or is away."""

    def __init__(self) -> None:
        self.sent: list[CancelGenerate] = []
        self.away = False
        self.tried = asyncio.Event()

    async def publish(self, subject: str, body: Any) -> None:
        self.tried.set()
        if self.away:
            raise BusError("the broker is away")
        assert subject.startswith(f"kvmesh.decode.{body.decoder.name}.")
        self.sent.append(body)


@asynccontextmanager
async def courier(post: Post) -> AsyncIterator[Courier]:
    made = Courier(cast(Bus, post))
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_cancels_go_out_in_order() -> None:
    post = Post()
    async with courier(post) as made:
        for i in range(5):
            made.cancel(f"a{i}", D0, "left")
        await made.drained(1.0)
    assert [cancel.attempt for cancel in post.sent] == [f"a{i}" for i in range(5)]
    assert made.sent == 5


async def test_one_attempt_is_cancelled_once() -> None:
    post = Post()
    async with courier(post) as made:
        made.cancel("a", D0, "left")
        made.cancel("a", D0, "left")
        await made.drained(1.0)
    assert len(post.sent) == 1


async def test_a_broker_that_is_away_delays_them() -> None:
    post = Post()
    post.away = True
    async with courier(post) as made:
        made.cancel("a", D0, "left")
        await post.tried.wait()
        await made.drained(0.01)
        assert len(made) == 1
        post.away = False
        await made.drained(2.0)
    assert [cancel.attempt for cancel in post.sent] == ["a"]


async def test_what_a_decoder_that_has_ended_would_get_is_forgotten() -> None:
    post = Post()
    post.away = True
    async with courier(post) as made:
        made.cancel("a", D0, "left")
        made.cancel("b", D1, "left")
        made.forget(D0)
        post.away = False
        await made.drained(2.0)
    assert [cancel.attempt for cancel in post.sent] == ["b"]
