"""The official client against the router, sync and async, streamed and not; and the answers in its types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest

from shared.messages import Generate, TokenLogprob
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, refusing, saying
from tests.front import Front, front, ids
from tests.tiny_model import served_model

TEXT = "The capital of France is Paris. 🙂"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.decoder(saying(*ids(TEXT)))
        await made.mesh.prefiller()
        await made.until_ready(2)
        yield made


async def test_async_whole(router: Front) -> None:
    async with router.openai() as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids(TEXT))


@pytest.mark.case("A5")
async def test_async_stream_with_usage(router: Front) -> None:
    async with router.openai() as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids(TEXT))
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_sync_client(router: Front) -> None:
    def ask() -> tuple[str, str, str]:
        with openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)  # type: ignore[arg-type]
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            text = client.completions.create(model="tiny", prompt="hi", max_tokens=4)
        return whole.choices[0].message.content or "", streamed, text.choices[0].text

    whole, streamed, text = await asyncio.to_thread(ask)
    assert whole == streamed == TEXT
    assert text == served_model().tokenizer.decode(ids(TEXT)[:4])


async def test_completions_stream_and_length(router: Front) -> None:
    async with router.openai() as client:
        stream = await client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert "".join(c.choices[0].text for c in chunks) == served_model().tokenizer.decode(ids(TEXT)[:3])


async def test_models(router: Front) -> None:
    async with router.openai() as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other/model")


async def test_bad_requests_raise_the_clients_own_error(router: Front) -> None:
    async with router.openai() as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)  # type: ignore[arg-type]
        assert raised.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)  # type: ignore[arg-type]


async def test_an_error_in_a_stream_raises_in_the_client(nats: Broker) -> None:
    read = asyncio.Event()

    async def breaks(decoder: FakeDecoder, generate: Generate) -> None:
        await saying(*ids("hello"), finish=None)(decoder, generate)
        await read.wait()
        await decoder.emit(generate, len(ids("hello")), [], error="decode step: broke", retryable=True)

    async with front(nats) as router:
        await router.mesh.decoder(breaks)
        await router.mesh.prefiller()
        await router.until_ready(2)
        async with router.openai() as client:
            text = ""
            with pytest.raises(openai.APIError, match="decode step: broke"):  # noqa: PT012
                async for chunk in await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):  # type: ignore[arg-type]
                    text += chunk.choices[0].delta.content or ""
                    if text == "hello":
                        read.set()
        assert text == "hello"


async def test_a_busy_mesh_raises_rate_limit(nats: Broker) -> None:
    async with front(nats, max_queue=0) as router:
        await router.mesh.decoder(refusing("busy"))
        await router.mesh.prefiller()
        await router.until_ready(2)
        async with router.openai() as client:
            with pytest.raises(openai.RateLimitError) as raised:
                await client.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        assert int(raised.value.response.headers["retry-after"]) >= 1


def sure(*tokens: int) -> Callable[[FakeDecoder, Generate], Awaitable[None]]:
    """Emits the tokens one by one, each with what was asked of its likeliest."""

    async def script(decoder: FakeDecoder, generate: Generate) -> None:
        top = generate.sampling.logprobs
        assert top is not None
        for i, token in enumerate(tokens):
            known = TokenLogprob(-0.5, [(token, -0.5), (7, -2.0), (8, -3.0)][:top])
            await decoder.emit(generate, i, [token], logprobs=[known])
        await decoder.emit(generate, len(tokens), [], finish="length")

    return script


async def test_log_probabilities_in_the_clients_types(nats: Broker) -> None:
    tokens = ids(TEXT)
    async with front(nats) as router:
        await router.mesh.decoder(sure(*tokens))
        await router.mesh.prefiller()
        await router.until_ready(2)
        async with router.openai() as client:
            asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            chunks = [chunk async for chunk in stream]
            plain = await client.completions.create(model="tiny", prompt="hi", logprobs=1)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert bytes(b for one in content for b in one.bytes or []).decode() == TEXT
    assert {len(one.top_logprobs) for one in content} == {2}
    streamed = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content or []]
    assert streamed == content
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.token_logprobs == [-0.5] * len(tokens)
