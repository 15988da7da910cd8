"""The HTTP interface's edges: every error in OpenAI's shape, health, metrics, limits, traces."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.router.api import Api
from services.router.keys import Keyring
from shared.messages import Load
from shared.web.server import listening
from tests.broker import Broker
from tests.fake_mesh import refusing, saying
from tests.front import HI, Front, front, ids

TEXT = "the quick brown fox"


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats, max_body_bytes=10_000) as made:
        await made.mesh.decoder(saying(*ids(TEXT)))
        await made.mesh.prefiller()
        await made.until_ready(2)
        yield made


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"model": 1}', b"\xff\xfe"])
async def test_bad_bodies_are_400(router: Front, path: str, body: bytes) -> None:
    async with router.session.post(router.url + path, data=body) as response:
        assert response.status == 400
        assert (await error_of(response))["type"] == "invalid_request_error"
        assert response.headers["x-request-id"]


async def test_errors_before_a_stream_are_statuses(router: Front) -> None:
    async with router.chat(stream=True, temperature=9) as response:
        assert response.status == 400
        assert (await error_of(response))["param"] == "temperature"


async def test_a_large_body_is_413(router: Front) -> None:
    async with router.session.post(router.url + "/v1/chat/completions", data=b"x" * 20_000) as response:
        assert response.status == 413
        assert "too large" in (await error_of(response))["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/chat/completions", 405), ("GET", "/v1/nope", 404), ("PUT", "/", 404)]
)
async def test_wrong_paths_and_methods(router: Front, method: str, path: str, status: int) -> None:
    async with router.session.request(method, router.url + path) as response:
        assert response.status == status
        await error_of(response)


async def test_what_is_wrong_costs_the_mesh_nothing(router: Front) -> None:
    (decoder,) = [i for i in router.mesh.alive if i.announcement.role == "decode"]
    for fields in ({"tools": [{}]}, {"max_tokens": 10_000}, {"messages": []}, {"model": "x"}):
        status, _, _ = await router.answer(**fields)
        assert status in (400, 404)
    assert decoder.generates == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("dp", [1, 3])
async def test_the_pools_are_a_limit(nats: Broker, dp: int) -> None:
    """One of them, however many data parallel ranks a decoder has."""
    async with front(nats) as router:
        load = Load(free_pages=4 * dp, largest_free_pages=4, total_pages=4 * dp)
        await router.mesh.decoder(saying(*ids(TEXT)), load=load, dp=dp)
        await router.mesh.prefiller()
        await router.until_ready(2)
        status, body, _ = await router.answer(max_tokens=100)
        assert (status, body["error"]["param"]) == (400, "max_tokens")
        assert "KV pool of 64 tokens" in body["error"]["message"]


async def test_a_long_prompt_is_tokenized_aside_and_still_right(nats: Broker) -> None:
    async with front(nats) as router:
        decoder = await router.mesh.decoder(saying(*ids(TEXT)))
        await router.mesh.prefiller()
        await router.until_ready(2)
        text = "🙂" * 1100
        status, body, _ = await router.answer(messages=[{"role": "user", "content": text}])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert decoder.generates == []


async def test_models(router: Front) -> None:
    async with router.session.get(router.url + "/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    async with router.session.get(router.url + "/v1/models/some/other") as response:
        assert response.status == 404
        assert (await error_of(response))["code"] == "model_not_found"


@pytest.mark.case("C2")
async def test_metrics_tell_what_happened(router: Front) -> None:
    assert (await router.answer())[0] == 200
    async with router.chat(stream=True) as response:
        await response.read()
    assert (await router.answer(n=0))[0] == 400
    (decoder,) = [i for i in router.mesh.alive if i.announcement.role == "decode"]
    decoder.script = refusing("invalid", retryable=False)  # type: ignore[attr-defined]
    assert (await router.answer())[0] == 400
    async with router.session.get(router.url + "/metrics") as response:
        families = {f.name: f for f in text_string_to_metric_families(await response.text())}

    def value(family: str, sample: str, **labels: str) -> float:
        return sum(s.value for s in families[family].samples if s.name == sample and labels.items() <= s.labels.items())

    tokens = len(ids(TEXT))
    assert value("kvmesh_requests", "kvmesh_requests_total", endpoint="chat", outcome="ok") == 2
    assert value("kvmesh_requests", "kvmesh_requests_total", endpoint="chat", outcome="rejected") == 2
    assert value("kvmesh_attempts", "kvmesh_attempts_total", outcome="ok") == 2
    assert value("kvmesh_refusals", "kvmesh_refusals_total", code="invalid") == 1
    assert value("kvmesh_paths", "kvmesh_paths_total", path="prefill+decode") == 2
    assert value("kvmesh_output_tokens", "kvmesh_output_tokens_total") == 2 * tokens
    assert value("kvmesh_transferred_bytes", "kvmesh_transferred_bytes_total") == 2 * 1024
    assert value("kvmesh_ttft_seconds", "kvmesh_ttft_seconds_count") == 2
    assert value("kvmesh_itl_seconds", "kvmesh_itl_seconds_count") == 2 * (tokens - 1)
    assert value("kvmesh_itl_seconds", "kvmesh_itl_seconds_bucket", le="+Inf") == 2 * (tokens - 1)
    assert value("kvmesh_e2e_seconds", "kvmesh_e2e_seconds_count") == 4
    assert value("kvmesh_instances", "kvmesh_instances", role="decode", state="ready") == 1
    assert value("kvmesh_attempts_open", "kvmesh_attempts_open") == 0
    assert value("kvmesh_queue_depth", "kvmesh_queue_depth") == 0


async def test_a_body_that_never_comes_has_a_deadline(router: Front) -> None:
    impatient = Api(router.service, Keyring({}, time.monotonic), body_s=0.05).application()
    async with listening(impatient, "127.0.0.1", 0) as url, asyncio.timeout(5.0):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_curls_default_content_type_is_taken(router: Front) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    data = json.dumps(HI).encode()
    async with router.session.post(router.url + "/v1/chat/completions", data=data, headers=headers) as response:
        assert response.status == 200
