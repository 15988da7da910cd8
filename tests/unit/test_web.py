"""Errors as HTTP says them, events as SSE says them, a server that says which port it could not have."""

from __future__ import annotations

import json

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from shared.errors import AttemptFailed, BusError, ConfigError, Refused, RequestError
from shared.web import sse
from shared.web.errors import describe, errors_as_json
from shared.web.health import Readiness, add_health
from shared.web.server import listening

CASES = [
    (RequestError("m", param="p"), 400, "invalid_request_error", None),
    (RequestError("m", param="model", status=404, code="model_not_found"), 404, "invalid_request_error", None),
    (Refused("busy", status=429, retry_after_s=2.2), 429, "rate_limit_error", "3"),
    (Refused("none there"), 503, "service_unavailable_error", "1"),
    (AttemptFailed("prefill", "gone"), 503, "server_error", "1"),
    (AttemptFailed("decode", "broke", retryable=False), 500, "server_error", None),
    (BusError("away"), 503, "service_unavailable_error", "1"),
    (TimeoutError(), 504, "timeout_error", None),
    (web.HTTPNotFound(), 404, "invalid_request_error", None),
    (web.HTTPRequestEntityTooLarge(1, 2), 413, "invalid_request_error", None),
    (ValueError("a secret"), 500, "server_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), CASES)
def test_every_error_has_one_answer(error: Exception, status: int, kind: str, retry_after: str | None) -> None:
    answer = describe(error)
    assert (answer.status, answer.body.error.type, answer.headers.get("Retry-After")) == (status, kind, retry_after)
    assert set(json.loads(answer.body.encode())["error"]) == {"message", "type", "param", "code"}


def test_a_fault_of_the_program_does_not_show() -> None:
    assert "secret" not in describe(ValueError("a secret")).body.error.message


def test_events() -> None:
    assert sse.data(b"{}") == b"data: {}\n\n"
    assert sse.error(b"{}") == b"event: error\ndata: {}\n\n"


async def get(url: str) -> tuple[int, str, dict[str, str]]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text(), dict(response.headers)


class TestServer:
    def app(self, *, ready: bool = True) -> web.Application:
        async def broken(_: web.Request) -> web.Response:
            raise ValueError("a secret")

        app = web.Application(middlewares=[errors_as_json])
        app.router.add_get("/broken", broken)
        readiness = Readiness(detail={"x": 1}) if ready else Readiness(reason="no decoder")
        add_health(app, lambda: readiness, CollectorRegistry())
        return app

    async def test_health_ready_and_metrics(self) -> None:
        async with listening(self.app(), "127.0.0.1", 0) as url:
            assert (await get(url + "/health"))[:2] == (200, '{"status":"alive"}')
            assert (await get(url + "/ready"))[:2] == (200, '{"status":"ready","x":1}')
            assert (await get(url + "/metrics"))[0] == 200

    async def test_not_ready_is_503_with_the_reason(self) -> None:
        async with listening(self.app(ready=False), "127.0.0.1", 0) as url:
            status, body, headers = await get(url + "/ready")
        assert (status, json.loads(body)["reason"], headers["Retry-After"]) == (503, "no decoder", "1")

    async def test_unknown_paths_methods_and_faults_are_openais_errors(self, caplog: pytest.LogCaptureFixture) -> None:
        async with listening(self.app(), "127.0.0.1", 0) as url:
            for path, status in (("/nope", 404), ("/broken", 500)):
                got, body, _ = await get(url + path)
                assert got == status
                assert "message" in json.loads(body)["error"]
            async with aiohttp.ClientSession() as session, session.post(url + "/health") as response:
                assert response.status == 405
                assert "GET" in response.headers["Allow"]
                assert "POST is not allowed here" in (await response.json())["error"]["message"]
        assert "a secret" in caplog.text, "the log has the traceback"

    async def test_a_port_that_is_taken_is_a_setting_that_is_wrong(self) -> None:
        async with listening(self.app(), "127.0.0.1", 0) as url:
            port = int(url.rsplit(":", 1)[1])
            with pytest.raises(ConfigError, match="KVMESH_PORT"):
                async with listening(self.app(), "127.0.0.1", port):
                    pytest.fail("it was not taken")
