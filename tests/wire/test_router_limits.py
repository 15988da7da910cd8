"""What a client may do to a router's connections: each bound ends in a clear error, or in a closed connection in time, and the
others are served meanwhile. Nothing secret gets into logs and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.router import new_key
from services.router.api import Api
from services.router.keys import Keyring
from shared.bus import Access, Bus
from shared.errors import BusError
from shared.web.connection import Bounds
from shared.web.server import listening
from tests.broker import Broker
from tests.fake_mesh import saying
from tests.front import HI, Front, front, ids

HEADERS_S = 0.5
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def bounded(broker: Broker, **bounds: Any) -> AsyncIterator[Front]:
    """A router with these bounds for its connections."""
    async with front(broker) as router:
        await router.mesh.decoder(saying(*ids("hello")))
        await router.mesh.prefiller()
        await router.until_ready(2)
        api = Api(router.service, Keyring({}, time.monotonic)).application()
        async with listening(api, "127.0.0.1", 0, bounds=Bounds(**bounds)) as url:
            router.url = url
            yield router


async def connect(router: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(router.url).port)


async def answer_to(router: Front, said: bytes) -> tuple[int, dict[str, Any]]:
    """The answer, after which the connection must end."""
    reader, writer = await connect(router)
    writer.write(said)
    async with asyncio.timeout(5):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.fixture
async def router(shared_broker: Broker) -> AsyncIterator[Front]:
    async with bounded(shared_broker, headers_s=HEADERS_S, max_connections=8) as made:
        yield made


LONG = b"x" * 9000


@pytest.mark.parametrize(
    "said",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + LONG + b"\r\n\r\n",
        b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(200)) + b"\r\n",
        b"\x16\x03\x01 hello, TLS?\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["header", "line", "headers", "tls", "length", "smuggled"],
)
async def test_what_is_no_request_is_400_in_openais_shape(router: Front, said: bytes) -> None:
    status, error = await answer_to(router, said)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "bad_request")
    assert set(error) == {"message", "type", "param", "code"}
    assert (await router.answer())[0] == 200


@pytest.mark.parametrize("depth", [2000, 400_000])
async def test_a_body_nested_deeply_is_400(router: Front, depth: int) -> None:
    """In a field that takes anything."""
    body = b'{"model": "tiny", "messages": [], "chat_template_kwargs": {"a": ' + b"[" * depth + b"]" * depth + b"}}"
    async with router.session.post(router.url + CHAT, data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert (await router.answer())[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n"])
async def test_slow_headers_end_with_408_in_time(router: Front, said: bytes) -> None:
    started = time.monotonic()
    slow = asyncio.create_task(answer_to(router, said))
    while not slow.done():
        assert (await router.answer())[0] == 200
    status, error = await slow
    assert (status, error["code"]) == (408, "request_timeout")
    assert HEADERS_S - 0.1 < time.monotonic() - started < HEADERS_S + 1


async def test_headers_a_byte_at_a_time_gain_no_time(router: Front) -> None:
    reader, writer = await connect(router)
    started = time.monotonic()
    writer.write(b"GET /health HTTP/1.1\r\n")
    reading = asyncio.create_task(reader.read())
    while not reading.done():
        writer.write(b"A: b\r\n")
        await asyncio.wait({reading}, timeout=0.02)
    assert b" 408 " in await reading
    assert time.monotonic() - started < HEADERS_S + 1
    writer.close()


async def test_one_whose_headers_are_here_is_not_hurried(router: Front) -> None:
    """Its body may take longer than headers may, and so may the time between two requests."""
    reader, writer = await connect(router)
    body = json.dumps({**HI, "max_tokens": 1}).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    for _ in range(2):
        writer.write(head + body[:5])
        await asyncio.sleep(HEADERS_S + 0.1)
        writer.write(body[5:])
        async with asyncio.timeout(5):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"}]")
    writer.close()


async def test_too_many_connections_are_503_and_those_that_are_there_are_served(router: Front) -> None:
    assert (await router.answer())[0] == 200
    async with AsyncExitStack() as held:
        for _ in range(7):
            _, writer = await connect(router)
            held.callback(writer.close)
        status, error = await answer_to(router, b"")
        assert (status, error["code"]) == (503, "unavailable")
        assert (await router.answer())[0] == 200, "over the connection that was kept"
    async with asyncio.timeout(HEADERS_S + 2):
        while (await answer_to(router, b"GET / HTTP/1.0\r\n\r\n"))[0] == 503:  # noqa: ASYNC110 - what is closed has no event
            await asyncio.sleep(0.02)


async def test_a_key_in_a_malformed_request_is_told_to_nobody(
    shared_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = new_key.add(tmp_path / "keys", "team-a", None, None)
    async with front(shared_broker, api_keys=str(tmp_path / "keys")) as router:
        for broken in (f"Bearer {key}\0", f"Bearer {key}" + "x" * 9000, f"Basic {key}", f"Bearer {key}x"):
            said = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {broken}\r\n\r\n"
            status, error = await answer_to(router, said.encode())
            assert status in (400, 401)
            assert key not in json.dumps(error)
    assert "could not be read" in caplog.text
    assert key not in caplog.text


async def test_a_password_that_the_broker_refuses_is_told_to_nobody(
    shared_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "a-very-secret-word"
    url = shared_broker.url.replace("//", f"//someone:{secret}@")
    for access in (Access(url=shared_broker.url, user="router", password=secret), Access(url=url)):
        with pytest.raises(BusError) as caught:
            async with Bus.connect(access, timeout_s=0.5):
                pass
        for shown in (str(caught.value), repr(caught.value), repr(access)):
            assert secret not in shown
    assert secret not in caplog.text
