"""The prompt given back with its log-probabilities: computed by the decoder alone, chunk by chunk, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.protocol import Row
from shared.engine.whole import Whole, WholeConfig
from tests.front import events
from tests.served import Served, served

WORDS = "the quick brown fox jumps over the lazy dog. The capital of France is Paris. "


async def complete(mesh: Served, **fields: Any) -> tuple[dict[str, Any], Any]:
    status, body, headers = await mesh.post("/v1/completions", {"model": "tiny", "temperature": 0, **fields})
    assert status == 200, body
    made: dict[str, Any] = json.loads(body)
    return made, headers


def wanted(directory: Path, tokens: list[int]) -> torch.Tensor:
    """Of each position, of the whole vocabulary."""
    whole = Whole(directory, WholeConfig(page_size=4, kv_tokens=2048))
    (pages,) = whole.page_tables([len(tokens)])
    logits = whole.model.all_logits([Row(tokens=tokens, start=0, pages=pages)])
    return torch.log_softmax(torch.from_numpy(logits).double(), -1)


async def test_a_prompts_tokens_come_with_what_the_model_thought_of_them(served_directory: Path) -> None:
    prompt = WORDS * 12  # more than one chunk of 256
    async with served(served_directory) as mesh:
        tokenizer = mesh.service.model.tokenizer
        tokens = tokenizer.encode(prompt, add_special_tokens=True).ids
        assert len(tokens) > 256
        known = wanted(served_directory, tokens)
        scored, headers = await complete(mesh, prompt=prompt, echo=True, logprobs=3, max_tokens=4)
        (choice,) = scored["choices"]
        assert headers["x-kvmesh-path"] == "decode"
        assert choice["text"].startswith(prompt)
        said = choice["logprobs"]
        made = scored["usage"]["completion_tokens"]
        assert {len(values) for values in said.values()} == {len(tokens) + made}
        assert said["token_logprobs"][0] is said["top_logprobs"][0] is None
        for at, token in enumerate(tokens[1:], 1):
            assert said["token_logprobs"][at] == pytest.approx(float(known[at - 1, token]), abs=1e-3)
            top = max(said["top_logprobs"][at].values())
            assert top == pytest.approx(float(known[at - 1].max()), abs=1e-3)
            assert prompt[said["text_offset"][at] :].startswith(tokenizer.decode([token]))
        plain, headers = await complete(mesh, prompt=prompt, max_tokens=4)
        assert headers["x-kvmesh-path"] == "prefill+decode"
        assert choice["text"] == prompt + plain["choices"][0]["text"]
        only, _ = await complete(mesh, prompt=prompt, echo=True, max_tokens=0, logprobs=0)
        (choice,) = only["choices"]
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        assert choice["logprobs"]["token_logprobs"] == said["token_logprobs"][: len(tokens)]
        assert choice["logprobs"]["top_logprobs"] is None
        assert only["usage"]["completion_tokens"] == 0
        nothing, headers = await complete(mesh, prompt=prompt, echo=True, max_tokens=0)
        assert (nothing["choices"][0]["text"], nothing["choices"][0]["logprobs"]) == (prompt, None)
        assert headers["x-kvmesh-path"] == "decode"


async def test_it_streams_before_the_output(served_directory: Path) -> None:
    async with served(served_directory) as mesh:
        fields = {"prompt": WORDS, "echo": True, "logprobs": 2, "max_tokens": 5}
        whole, _ = await complete(mesh, **fields)
        status, body, _ = await mesh.post(
            "/v1/completions", {"model": "tiny", "temperature": 0, "stream": True, **fields}
        )
        assert status == 200
        chunks = [json.loads(event) for event in events(body.decode()) if event != "[DONE]"]
        first, *others = [chunk["choices"][0] for chunk in chunks]
        assert first["text"].startswith(WORDS)
        joined = {
            name: first["logprobs"][name] + [v for o in others for v in o["logprobs"][name]]
            for name in first["logprobs"]
        }
        (choice,) = whole["choices"]
        assert first["text"] + "".join(other["text"] for other in others) == choice["text"]
        assert joined == choice["logprobs"]


async def test_preemption_repeats_and_loses_nothing(served_directory: Path) -> None:
    """Prompts with their scores, more than the pool holds at once as they grow."""
    async with served(served_directory, decode_pages=40) as mesh:
        asked = [
            {"prompt": WORDS[at:], "echo": True, "logprobs": 1, "max_tokens": 60, "ignore_eos": True}
            for at in (0, 8, 16, 24)
        ]
        alone = [(await complete(mesh, **fields))[0] for fields in asked]
        together = await asyncio.gather(*(complete(mesh, **fields) for fields in asked))
        decoder = mesh.nodes[1]
        assert decoder.service.ranks[0].scheduler.preempted > 0
        for one, (other, _) in zip(alone, together, strict=True):
            assert one["choices"][0]["text"] == other["choices"][0]["text"]
            values = [made["choices"][0]["logprobs"]["token_logprobs"] for made in (one, other)]
            assert values[1] == [None, *(pytest.approx(value, abs=1e-3) for value in values[0][1:])]
