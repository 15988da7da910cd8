"""/tokenize and /detokenize: what a generation would get, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.broker import Broker
from tests.fake_mesh import saying
from tests.front import HI, Front, front, ids

TEXT = "the quick brown f\u00f6x \U0001f642"


@pytest.fixture
async def router(shared_broker: Broker) -> AsyncIterator[Front]:
    async with front(shared_broker) as made:
        yield made


async def post(router: Front, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with router.session.post(router.url + path, json=body) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(router: Front, prefix: str) -> None:
    status, there = await post(router, f"{prefix}/tokenize", prompt=TEXT, add_special_tokens=False, model="tiny")
    assert (status, there["tokens"], there["count"]) == (200, ids(TEXT), len(ids(TEXT)))
    assert there["max_model_len"] == router.service.model.max_positions
    assert "token_strs" not in there
    assert await post(router, f"{prefix}/detokenize", tokens=there["tokens"]) == (200, {"prompt": TEXT})


async def test_strings_beside_the_tokens(router: Front) -> None:
    _, said = await post(router, "/tokenize", prompt="quick", add_special_tokens=False, return_token_strs=True)
    assert "".join(said["token_strs"]) == "quick"
    assert len(said["token_strs"]) == said["count"]


async def test_messages_are_what_a_chat_would_get(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids("x")))
    await router.mesh.prefiller()
    await router.until_ready(2)
    _, said = await post(router, "/tokenize", messages=HI["messages"])
    assert (await router.answer())[0] == 200
    assert decoder.generates[0].tokens == said["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI["messages"]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "nothing": 1}, 400, "nothing"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(router: Front, path: str, body: Any, status: int, param: str) -> None:
    found, said = await post(router, path, **body)
    assert (found, said["error"]["param"]) == (status, param)
