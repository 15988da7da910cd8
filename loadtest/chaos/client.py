"""One request, as one of several kinds of client makes it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp
import msgspec

from loadtest.chaos.reference import Case
from loadtest.chaos.verdict import Heard

SLOW_BYTES = 600
"""What a slow reader takes byte by byte, before it reads on as others do."""

Manner = Literal["whole", "stream", "leaver", "slow"]


class Wish(msgspec.Struct, frozen=True):
    """What is asked for, and how the client behaves. `patience_s`: until it leaves, or counts the answer as hung."""

    case: Case
    manner: Manner
    patience_s: float

    @property
    def stream(self) -> bool:
        return self.manner != "whole"


def draw_wish(draw: random.Random, cases: list[Case], hung_after_s: float) -> Wish:
    manner: Manner = draw.choices(("whole", "stream", "leaver", "slow"), (3, 5, 2, 1))[0]
    patience_s = draw.expovariate(3.0) if manner == "leaver" else hung_after_s
    return Wish(draw.choice(cases), manner, patience_s)


async def ask(session: aiohttp.ClientSession, url: str, wish: Wish) -> Heard:
    """Never raises but for cancellation: what went wrong is in the answer."""
    heard = Heard()
    try:
        async with asyncio.timeout(wish.patience_s):
            await _ask(session, url, wish, heard)
    except TimeoutError:
        if wish.manner == "leaver":
            heard.left = True
        else:
            heard.timed_out = True
    except (aiohttp.ClientError, ConnectionError, OSError) as error:
        heard.broken = f"{type(error).__name__}: {error}"
    return heard


async def _ask(session: aiohttp.ClientSession, url: str, wish: Wish, heard: Heard) -> None:
    async with session.post(f"{url}/v1/completions", json=_body(wish)) as answer:
        heard.status = answer.status
        heard.retry_after = "Retry-After" in answer.headers
        tries = answer.headers.get("x-kvmesh-tries")
        heard.tries = int(tries) if tries is not None else None
        if answer.status != 200:
            heard.error = _error_of(await answer.read())
        elif wish.stream:
            async for line in _lines(answer, slow=wish.manner == "slow"):
                _hear(line, heard)
        else:
            _take(msgspec.json.decode(await answer.read()), heard)
            heard.done = 1


def _body(wish: Wish) -> dict[str, Any]:
    case = wish.case
    body: dict[str, Any] = {"model": "chaos", "prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0}
    return {**body, "stream": wish.stream, "ignore_eos": True, "return_token_ids": True}


async def _lines(answer: aiohttp.ClientResponse, *, slow: bool) -> AsyncIterator[bytes]:
    """Raises `ClientPayloadError` where the body ends before its end."""
    rest, taken = b"", 0
    while True:
        if slow and taken < SLOW_BYTES:
            await asyncio.sleep(0.01)
            piece = await answer.content.read(1)
        else:
            piece = await answer.content.readany()
        if not piece:
            break
        taken += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _hear(line: bytes, heard: Heard) -> None:
    if not line:
        return
    if heard.done or heard.error is not None:
        heard.after_end = True
    if line == b"data: [DONE]":
        heard.done += 1
    elif line.startswith(b"data: "):
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            heard.error = str(event["error"]["message"])
        else:
            _take(event, heard)


def _take(event: dict[str, Any], heard: Heard) -> None:
    for choice in event["choices"]:
        heard.text += choice["text"]
        heard.tokens += choice["token_ids"]
        heard.finish = choice["finish_reason"] or heard.finish


def _error_of(body: bytes) -> str | None:
    """The message; None where the body has not OpenAI's shape."""
    try:
        detail = msgspec.json.decode(body)["error"]
        return str(detail["message"]) if {"message", "type", "param", "code"} <= detail.keys() else None
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return None
