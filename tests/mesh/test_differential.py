"""One answer: the same JSON through the mesh, whole and streamed, as from the whole model in one process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests import random_models
from tests.differential import REQUESTS, table
from tests.front import events
from tests.reference import Reference
from tests.served import Served, served

README = Path(__file__).parents[2] / "README.md"
ASIDE = ("id", "created", "system_fingerprint")
EACH = [(path, asked) for group in REQUESTS.values() for path, asked in group]


def test_readme_has_the_table() -> None:
    assert table() in README.read_text()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary is the tokenizer's, so that every token has a text."""
    return random_models.save_served(tmp_path_factory.mktemp("llama"), seed=3)


async def test_the_mesh_answers_as_the_whole_model(directory: Path) -> None:
    reference = Reference(directory)
    wanted = [reference.answer(asked, chat="messages" in asked) for _, asked in EACH]
    async with served(directory) as mesh:
        whole = await asyncio.gather(*(answered(mesh, path, asked) for path, asked in EACH))
        streamed = await asyncio.gather(*(assembled(mesh, path, asked) for path, asked in EACH))
    for (_, asked), expected, one, other in zip(EACH, wanted, whole, streamed, strict=True):
        assert one == same(expected), asked
        assert other == same(expected), f"streamed: {asked}"
    stopped = [
        choice["finish_reason"] == "stop"
        for (_, asked), answer in zip(EACH, wanted, strict=True)
        for choice in answer["choices"]
        if "stop" in asked and "E" in str(asked["stop"])
    ]
    assert len(stopped) == 5
    assert all(stopped), "stop strings that no output has test nothing"


def same(value: Any) -> Any:
    """Equal, but for the order of float sums."""
    match value:
        case float():
            return pytest.approx(value, abs=1e-3)
        case dict():
            return {key: same(inner) for key, inner in value.items()}
        case list():
            return [same(inner) for inner in value]
    return value


async def answered(mesh: Served, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    status, body, _ = await mesh.post(path, asked)
    assert status == 200, (asked, body)
    made: dict[str, Any] = json.loads(body)
    return {name: value for name, value in made.items() if name not in ASIDE}


async def assembled(mesh: Served, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer that a stream's chunks come to."""
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    status, raw, _ = await mesh.post(path, body)
    assert status == 200, (asked, raw)
    *said, done = events(raw.decode())
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in said]
    assert len({tuple(chunk[name] for name in ASIDE) for chunk in chunks}) == 1
    choices: dict[int, dict[str, Any]] = {}
    ids = {}
    for chunk in chunks:
        ids |= {name: chunk[name] for name in ("prompt_token_ids",) if name in chunk}
        for piece in chunk["choices"]:
            grow(choices.setdefault(piece["index"], {}), piece)
    kind = "chat.completion" if "messages" in asked else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind + ".chunk" if "messages" in asked else kind}
    usage = [chunk["usage"] for chunk in chunks if chunk["usage"] is not None]
    assert len(usage) == 1
    ordered = [choices[index] for index in sorted(choices)]
    return {"object": kind, "model": chunks[0]["model"], "choices": ordered, "usage": usage[0], **ids}


def grow(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    assert choice.get("finish_reason") is None, "nothing follows a choice's end"
    if not choice:
        choice |= {"index": piece["index"], "logprobs": None, "finish_reason": None}
    choice["finish_reason"] = piece["finish_reason"]
    if "delta" in piece:
        message = choice.setdefault("message", {"role": "", "content": "", "refusal": None})
        for name, value in piece["delta"].items():
            message[name] += value
    else:
        choice["text"] = choice.get("text", "") + piece["text"]
    if "token_ids" in piece:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    if "prompt_token_ids" in piece:
        choice["prompt_token_ids"] = piece["prompt_token_ids"]
    if piece["logprobs"] is not None:
        known = choice["logprobs"] or {name: [] if v is not None else None for name, v in piece["logprobs"].items()}
        choice["logprobs"] = {
            name: value if value is None else known[name] + value for name, value in piece["logprobs"].items()
        }
