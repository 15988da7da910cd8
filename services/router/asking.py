"""Requests on the bus from which a cancellation always comes out."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shared.bus import Bus


async def ask(bus: Bus, subject: str, body: msgspec.Struct, reply: Any, *, timeout_s: float) -> Any:
    """`Bus.request`. On Python 3.11 `asyncio.wait_for`, which the client uses, returns the answer and drops a cancellation
    that comes in the same moment; the caller would then go on for a client that has left."""
    task = asyncio.current_task()
    assert task is not None, "called from a task"
    before = task.cancelling()
    try:
        return await bus.request(subject, body, reply, timeout_s=timeout_s)
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
