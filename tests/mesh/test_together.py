"""Everything at once: choices, grammars, log-probabilities, an echoed prompt, penalties and tools say the same where tokens are
proposed and where they are not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from tests.mesh.processes import Up, up

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORDS = "the quick brown fox jumps over the lazy dog. " * 3
SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["ann", "anna"]}, "minItems": 3, "maxItems": 6}},
    "required": ["names"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
REQUESTS: list[dict[str, Any]] = [
    {"n": 2, "response_format": FORMAT, "temperature": 0.8, "seed": 3, "max_tokens": 60},
    {"n": 2, "response_format": FORMAT, "temperature": 0, "max_tokens": 60, "logprobs": 2},
    {"structured_outputs": {"regex": "(ab){6,9}c"}, "temperature": 0, "max_tokens": 40, "frequency_penalty": 0.5},
    {
        "structured_outputs": {"choice": ["the quick brown fox", "the quick brown cow"]},
        "temperature": 0,
        "max_tokens": 40,
    },
    {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 20},
    {"echo": True, "logprobs": 0, "temperature": 0.7, "seed": 4, "max_tokens": 20, "n": 2},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"temperature": 0, "max_tokens": 40, "min_tokens": 20, "repetition_penalty": 1.05, "logprobs": 0},
    {"temperature": 0.4, "seed": 8, "max_tokens": 40, "stop": ["e q", "zz"], "n": 3},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ngram", "draft"])
async def meshes(served_directory, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Up, Up]]:
    """One that proposes nothing, and one that does."""
    speculate = "ngram" if request.param == "ngram" else f"draft:{served_directory}"
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(up(served_directory, "--decoders", "1"))
        other = await stack.enter_async_context(up(served_directory, "--decoders", "1", "--speculate", speculate))
        yield plain, other


async def answer(mesh: Up, body: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    got = await mesh.http.post(mesh.url + "/v1/completions", json=body, timeout=60)
    assert got.status_code == 200, got.text
    made: dict[str, Any] = got.json()
    return {key: value for key, value in made.items() if key not in ("id", "created")}


async def streamed(mesh: Up, body: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """Text and reason by choice."""
    texts: dict[int, tuple[str, str]] = {}
    async with mesh.http.stream("POST", mesh.url + "/v1/completions", json={**body, "stream": True}, timeout=60) as got:
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text, reason = texts.get(choice["index"], ("", ""))
                    texts[choice["index"]] = text + choice["text"], choice["finish_reason"] or reason
    return texts


def rounded(value: Any) -> Any:
    """Logarithms to 0.001."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


@pytest.mark.parametrize("number", range(len(REQUESTS)))
async def test_the_same_answers_with_and_without_proposals(meshes: tuple[Up, Up], number: int) -> None:
    plain, other = meshes
    body = {"model": plain.name, "prompt": WORDS, **REQUESTS[number]}
    expected, got, events = await asyncio.gather(answer(plain, body), answer(other, body), streamed(other, body))
    assert rounded(got) == rounded(expected)
    assert events == {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in got["choices"]}
    await other.until_idle()
