"""The router's spans, seen by a collector: an OTLP/HTTP receiver in the test, the router as a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from shared.web.server import listening
from tests.broker import Broker
from tests.fake_mesh import fake_mesh, saying
from tests.front import ids
from tests.wire.test_router_process import ROOT, model

__all__ = ["model"]

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def take(self, request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[str]:
    """Its URL; stopped with SIGTERM, so that it sends its last spans."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", *flags, cwd=ROOT, env=dict(os.environ), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(15.0):
            yield (await process.stdout.readline()).decode().rsplit("http=", 1)[1].strip()
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_request_is_a_span_with_its_parts_in_the_clients_trace(nats: Broker, model: Path) -> None:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with listening(app, "127.0.0.1", 0) as endpoint, fake_mesh(nats) as mesh, aiohttp.ClientSession() as session:
        flags = ["--nats-url", nats.url, "--nats-token", nats.token, "--model", str(model), "--port", "0"]
        async with router_process(*flags, "--otlp-endpoint", endpoint) as url:
            async with session.get(url + "/ready") as response:
                assert response.status == 503
            digest = await learned_digest(model)
            decoder = await mesh.decoder(saying(*ids("hello")), digest=digest)
            await mesh.prefiller(digest=digest)
            async with asyncio.timeout(5.0):
                while True:
                    async with session.get(url + "/ready") as response:
                        if response.status == 200:
                            break
            body = {"model": "tiny-model", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
            async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
                await response.read()
    spans = {span.name: span for span in collector.spans}
    assert {"router.request", "router.queue", "router.attempt"} <= set(spans)
    request = spans["router.request"]
    assert request.trace_id.hex() == TRACE
    assert spans["router.attempt"].parent_span_id == request.span_id
    values = {a.key: a.value for a in request.attributes}
    assert values["kvmesh.path"].string_value == "prefill+decode"
    assert values["kvmesh.request_id"].string_value == "mine"
    assert values["kvmesh.attempt"].string_value == decoder.generates[0].attempt
    assert values["kvmesh.ttft_s"].double_value > 0
    assert values["kvmesh.output_tokens"].int_value == len(ids("hello"))
    assert decoder.reply_to.context is not None
    assert TRACE in json.dumps(decoder.reply_to._raw.headers), "the decoder gets the trace context"


async def learned_digest(directory: Path) -> str:
    from shared.models.digest import model_digest

    return await asyncio.to_thread(model_digest, directory)
