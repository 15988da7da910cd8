"""A whole router under test: a real broker, a real HTTP server, fake instances on the bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
from prometheus_client import CollectorRegistry

from services.router.main import running
from services.router.service import RouterService
from shared.config import RouterSettings
from shared.messages import Generate
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, FakeMesh, fake_mesh
from tests.tiny_model import byte_level, served_model

HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

DEAD_AFTER_S = 0.8


def ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


class Front:
    """The router as a client and an operator see it."""

    def __init__(self, url: str, service: RouterService, mesh: FakeMesh, session: aiohttp.ClientSession) -> None:
        self.url, self.service, self.mesh, self.session = url, service, mesh, session
        self.closing: list[Callable[[], None]] = []
        """Called at the end, before the router is checked to be clean."""

    def chat(self, *, stream: bool = False, **fields: Any) -> Any:
        """A chat request in the making: `async with` it, or `await` it."""
        return self.session.post(self.url + "/v1/chat/completions", json={**HI, "stream": stream, **fields})

    async def answer(self, **fields: Any) -> tuple[int, dict[str, Any], Any]:
        """Status, body, headers of a chat that is not streamed."""
        async with self.chat(**fields) as response:
            return response.status, await response.json(), response.headers

    async def ready(self) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + "/ready") as response:
            return response.status, await response.json()

    async def until_ready(self, count: int) -> None:
        """Until the router has heard of so many instances."""
        await self.until(lambda: len(self.service.registry.instances) >= count)

    async def until(self, what: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Until something inside the router holds; nothing outside tells of it."""
        async with asyncio.timeout(timeout_s):
            while not what():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def metric(self, name: str, **labels: str) -> float:
        registry: CollectorRegistry = self.service.metrics.registry
        return registry.get_sample_value(name, labels) or 0.0

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=20.0)

    async def clean(self) -> None:
        """Nothing is left of any request: attempts, places, counts. What must hold after every test."""
        relay = self.service.relay
        await self.until(lambda: not len(relay.table) and not len(relay.line) and not len(relay.courier))
        for known in self.service.registry.instances:
            assert known.tally.attempts == 0, f"{known.ref.name} still counts {known.tally.attempts}"


@asynccontextmanager
async def front(broker: Broker, **settings: Any) -> AsyncIterator[Front]:
    """A router with short times, checked to be clean at the end."""
    defaults: dict[str, Any] = {
        "name": "router",
        "nats_url": broker.url,
        "nats_token": broker.token,
        "port": 0,
        "dead_after_s": DEAD_AFTER_S,
        "request_timeout_s": 20.0,
        "absence_s": 0.3,
    }
    chosen = RouterSettings(**{**defaults, **settings})
    async with (
        fake_mesh(broker) as mesh,
        running(chosen, served_model()) as (service, url),
        aiohttp.ClientSession() as session,
    ):
        made = Front(url, service, mesh, session)
        yield made
        for close in made.closing:
            close()
        await made.clean()


class Client:
    """A connection of its own, which can be cut at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, router: Front, *, part: float = 1.0, **fields: Any) -> Client:
        host, port = router.url.removeprefix("http://").split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        router.closing.append(client.leave)
        body = json.dumps({**HI, **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        client.writer.write(head + body[: int(len(body) * part)])
        await client.writer.drain()
        return client

    async def read_until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(5.0):
            return await self.reader.readuntil(mark)

    def leave(self) -> None:
        self.writer.transport.abort()


async def asked(decoder: FakeDecoder, count: int = 1) -> Generate:
    await decoder.until(lambda: len(decoder.generates) >= count)
    return decoder.generates[count - 1]


def events(text: str) -> list[str]:
    """The data of each event, names put in front where there are any."""
    assert text.endswith("\n\n")
    return [event.replace("\ndata: ", " ").removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]


def text_of(stream: str) -> str:
    chunks = [json.loads(event) for event in events(stream) if event != "[DONE]" and not event.startswith("event:")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk.get("choices", []))
