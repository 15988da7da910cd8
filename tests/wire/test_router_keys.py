"""API keys at the real router: who gets in, and what a key's limits do to its requests alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from services.router import new_key
from tests.broker import Broker
from tests.fake_mesh import accepting, saying
from tests.front import HI, Front, front, ids

PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/v1/detokenize"),
    ("GET", "/v1/models/tiny"),
]


@asynccontextmanager
async def guarded(broker: Broker, file: Path) -> AsyncIterator[Front]:
    async with front(broker, api_keys=str(file)) as router:
        await router.mesh.prefiller()
        yield router


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def post(router: Front, key: str, **fields: Any) -> tuple[int, dict[str, Any], Any]:
    async with router.session.post(
        router.url + "/v1/chat/completions", json={**HI, **fields}, headers=bearer(key)
    ) as answer:
        return answer.status, await answer.json(), answer.headers


async def test_no_key_no_answer(shared_broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = new_key.add(tmp_path / "keys", "team-a", None, None)
    async with guarded(shared_broker, tmp_path / "keys") as router:
        decoder = await router.mesh.decoder(saying(*ids("hello")))
        await router.until_ready(2)
        for method, path in PATHS:
            for headers in ({}, bearer(key[:-1])):
                async with router.session.request(method, router.url + path, json=HI, headers=headers) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_api_key"), path
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert not decoder.generates
        for path in ("/health", "/ready", "/metrics"):
            async with router.session.get(router.url + path) as answer:
                assert answer.status == 200
        client = openai.AsyncOpenAI(base_url=router.url + "/v1", api_key=key, max_retries=0)
        async with client:
            said = await client.chat.completions.create(**HI)
            assert said.choices[0].message.content == "hello"
            assert [card.id async for card in client.models.list()] == ["tiny"]
    assert key not in caplog.text


async def test_a_key_that_is_busy_does_not_keep_others_out(shared_broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    small, large = new_key.add(file, "small", 1, None), new_key.add(file, "large", None, None)
    async with guarded(shared_broker, file) as router:
        decoder = await router.mesh.decoder(accepting)
        await router.until_ready(2)
        running = asyncio.create_task(post(router, small))
        await decoder.until(lambda: len(decoder.generates) == 1)
        status, body, headers = await post(router, small)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "rate_limit_exceeded", "1")
        decoder.script = saying(*ids("hello"))
        assert (await post(router, large))[0] == 200
        await decoder.emit(decoder.generates[0], 0, ids("x"), finish="stop")
        assert (await running)[0] == 200
        assert (await post(router, small))[0] == 200


async def test_prompt_and_output_count(shared_broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = new_key.add(file, "team-a", None, 1)
    async with guarded(shared_broker, file) as router:
        decoder = await router.mesh.decoder(saying(*ids("hello")))
        await router.until_ready(2)
        status, body, _ = await post(router, key)
        assert status == 200
        used = body["usage"]["total_tokens"]
        status, body, headers = await post(router, key, stream=True)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 60 * (used - 1) < int(headers["Retry-After"]) <= 60 * used
        assert len(decoder.generates) == 1
