"""Several choices of one request on the wire: an attempt each, interleaved, and one end for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.keys import digest
from shared.messages import Accepted, Generate, RefusedReply, Reply, TokenLogprob
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, accepting, saying
from tests.front import HI, Front, events, front, ids

TEXT = "the quick brown fox"


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.prefiller()
        yield made


async def decoder(router: Front, script: Any) -> FakeDecoder:
    made: FakeDecoder = await router.mesh.decoder(script)
    await router.until_ready(2)
    return made


async def complete(router: Front, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "prompt": "hi", **fields}
    async with router.session.post(router.url + "/v1/completions", json=body) as response:
        return response.status, await response.json()


async def test_each_choice_is_an_attempt_with_draws_of_its_own(router: Front) -> None:
    there = await decoder(router, saying(*ids(TEXT)))
    status, body, headers = await router.answer(n=3, seed=4)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] == TEXT for choice in body["choices"])
    prompt = len(there.generates[0].tokens)
    made = 3 * len(ids(TEXT))
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made, **details
    }  # fmt: skip
    assert len({generate.attempt for generate in there.generates}) == 3
    assert len({generate.sampling.seed for generate in there.generates}) == 3
    assert headers["x-kvmesh-attempt"].count(",") == 2
    assert headers["x-kvmesh-path"] == "prefill+decode"


async def test_prompts_answer_in_order(router: Front) -> None:
    there = await decoder(router, saying(*ids(TEXT)))
    status, body = await complete(router, prompt=[[5, 6], [7, 8, 9]], n=2, return_token_ids=True)
    assert status == 200
    prompts = [choice["prompt_token_ids"] for choice in body["choices"]]
    assert prompts == [[5, 6], [5, 6], [7, 8, 9], [7, 8, 9]]
    assert body["usage"]["prompt_tokens"] == 5
    assert len(there.generates) == 4


@pytest.mark.parametrize("usage", [False, True])
async def test_choices_stream_side_by_side(router: Front, usage: bool) -> None:
    there = await decoder(router, accepting)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    request = asyncio.ensure_future(router.chat(stream=True, n=2, seed=1, **options))
    await there.until(lambda: len(there.generates) == 2)
    first, second = there.generates
    tokens = ids(TEXT)
    for i, token in enumerate(tokens):
        await there.emit(second, i, [token])
        await there.emit(first, i, [token])
    await there.emit(second, len(tokens), [], finish="stop")
    await there.emit(first, len(tokens), [], finish="length")
    async with await request as response:
        said = events((await response.read()).decode())
    assert said[-1] == "[DONE]"
    chunks = [json.loads(event) for event in said[:-1]]
    assert len({(c["id"], c["created"], c["system_fingerprint"]) for c in chunks}) == 1
    assert chunks[0]["system_fingerprint"].startswith("fp_")
    texts, reasons, roles = {0: "", 1: ""}, dict[int, str](), {0: 0, 1: 0}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert choice["index"] not in reasons, "nothing follows a choice's end"
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert (texts, reasons, roles) == ({0: TEXT, 1: TEXT}, {0: "length", 1: "stop"}, {0: 1, 1: 1}) or (
        (texts, reasons, roles) == ({0: TEXT, 1: TEXT}, {1: "length", 0: "stop"}, {0: 1, 1: 1})
    ), "which attempt is whose is not told"
    assert [bool(chunk["choices"]) for chunk in chunks].count(False) == usage
    if usage:
        assert chunks[-1]["usage"]["completion_tokens"] == 2 * len(tokens)


async def test_one_that_fails_before_the_first_byte_fails_the_request(router: Front) -> None:
    async def script(there: FakeDecoder, generate: Generate) -> Reply:
        if there.generates.index(generate) == 2:
            return RefusedReply(attempt=generate.attempt, code="invalid", reason="no", retryable=False)
        return Accepted(generate.attempt)

    there = await decoder(router, script)
    async with router.chat(n=3, stream=True) as response:
        assert response.status == 400
    await there.until(lambda: len(there.cancels) == 2)


async def test_one_that_fails_later_ends_the_stream_with_an_error(router: Front) -> None:
    there = await decoder(router, accepting)
    request = asyncio.ensure_future(router.chat(n=2, stream=True))
    await there.until(lambda: len(there.generates) == 2)
    for generate in there.generates:
        await there.emit(generate, 0, ids(TEXT)[:1])
    response = await request
    await there.emit(there.generates[1], 1, [], error="decode step: broken", retryable=False)
    said = events((await response.read()).decode())
    assert said[-1].startswith("event: error")
    assert "[DONE]" not in said
    await there.until(lambda: there.cancelled(there.generates[0]))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all(router: Front, stream: bool) -> None:
    there = await decoder(router, accepting)
    request = asyncio.ensure_future(router.chat(n=3, stream=stream))
    await there.until(lambda: len(there.generates) == 3)
    await there.emit(there.generates[0], 0, ids(TEXT)[:1])
    if stream:
        (await request).close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await there.until(lambda: len(there.cancels) == 3)


async def test_first_tokens_that_end_the_sequence_end_the_answer(router: Front) -> None:
    await decoder(router, saying())
    status, body, _ = await router.answer(n=2)
    assert status == 200
    said = [(choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]]
    assert said == [("", "stop")] * 2
    assert body["usage"]["completion_tokens"] == 0
    async with router.chat(n=2, stream=True) as response:
        chunks = [json.loads(event) for event in events(await response.text())[:-1]]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert sorted(filter(None, reasons)) == ["stop", "stop"]


async def test_a_large_echo_streams_whole_and_scores_that_were_lost_are_no_answer(router: Front) -> None:
    tokens = [at % 300 for at in range(400)]
    lose = False

    async def script(there: FakeDecoder, generate: Generate) -> None:
        assert generate.prefiller is None
        assert generate.prompt_logprobs == 20
        await there.reply_to.reply(Accepted(generate.attempt))
        top = [(at, -1.0 - at) for at in range(20)]
        for first in range(0, 399, 57):
            if not (lose and first == 114):
                scores = [TokenLogprob(-0.5, top)] * min(57, 399 - first)
                await there.emit(generate, 0, [], scores=scores, scored=first)
        await there.emit(generate, 0, [70], logprobs=[TokenLogprob(-0.25, top)], finish="length")

    await decoder(router, script)
    asked = {"model": "tiny", "prompt": tokens, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    async with router.session.post(router.url + "/v1/completions", json=asked) as response:
        assert response.headers["x-kvmesh-path"] == "decode"
        first, *_, last, done = events(await response.text())
    assert len(first) > 64 << 10
    known = json.loads(first)["choices"][0]["logprobs"]
    assert known["token_logprobs"] == [None, *[-0.5] * 399]
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    lose = True
    async with router.session.post(router.url + "/v1/completions", json=asked) as response:
        assert response.status == 503
        assert "log-probabilities" in (await response.json())["error"]["message"]


async def test_one_is_tried_again_alone(router: Front) -> None:
    """While no byte of it was sent: those of the others do not matter."""

    async def script(there: FakeDecoder, generate: Generate) -> None:
        await there.reply_to.reply(Accepted(generate.attempt))
        if there.generates.index(generate) == 1:
            await there.emit(generate, 0, [], error="decode step: broken")
        else:
            await there.emit(generate, 0, ids(TEXT), finish="stop")

    there = await decoder(router, script)
    status, body, _ = await router.answer(n=2)
    assert status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == [TEXT, TEXT]
    assert len(there.generates) == 3


async def test_choices_count_for_a_keys_limits(nats: Broker, tmp_path: Any) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.a]\nsha256 = "{digest("secret")}"\nmax_concurrent = 2\n')
    async with front(nats, api_keys=str(file)) as router:
        await router.mesh.prefiller()
        there = await decoder(router, accepting)
        headers = {"Authorization": "Bearer secret"}

        def ask(**fields: Any) -> Any:
            url = router.url + "/v1/chat/completions"
            return router.session.post(url, json={**HI, "stream": True, **fields}, headers=headers)

        async with ask(n=3) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "n")
        first = asyncio.ensure_future(ask(n=2))
        await there.until(lambda: len(there.generates) == 2)
        async with ask() as response:
            assert response.status == 429
        for generate in there.generates:
            await there.emit(generate, 0, ids(TEXT), finish="stop")
        async with await first as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
