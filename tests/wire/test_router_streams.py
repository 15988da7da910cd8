"""Streams on the wire: each token when it is made, exactly once, one `[DONE]` last or an error and none."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from shared.messages import Accepted, Emit, EmitBatch, Generate, InstanceRef
from tests.broker import Broker
from tests.fake_mesh import FakeDecoder, accepting, saying
from tests.front import HI, Front, events, front, ids, text_of

TEXT = "the quick brown fox"


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.prefiller()
        yield made


async def begin(router: Front, decoder: FakeDecoder, count: int = 1) -> Generate:
    await decoder.until(lambda: len(decoder.generates) >= count)
    return decoder.generates[count - 1]


async def next_event(response: aiohttp.ClientResponse) -> str:
    async with asyncio.timeout(5.0):
        return (await response.content.readuntil(b"\n\n")).decode().removesuffix("\n\n")


async def rest(response: aiohttp.ClientResponse) -> str:
    async with asyncio.timeout(10.0):
        return (await response.read()).decode()


async def manual(router: Front) -> FakeDecoder:
    """A decoder for which the test speaks."""
    decoder = await router.mesh.decoder(accepting)
    await router.until_ready(2)
    return decoder


async def test_each_token_is_on_the_wire_before_the_next_is_made(router: Front) -> None:
    decoder = await manual(router)
    tokens = ids(TEXT)
    request = asyncio.ensure_future(router.chat(stream=True))
    generate = await begin(router, decoder)
    await decoder.emit(generate, 0, [tokens[0]])
    response = await request
    assert "assistant" in await next_event(response)
    for i, token in enumerate(tokens):
        if i:
            await decoder.emit(generate, i, [token])
        chunk = json.loads((await next_event(response)).removeprefix("data: "))
        assert chunk["choices"][0]["delta"]["content"] == router.service.model.tokenizer.decode([token])
    await decoder.emit(generate, len(tokens), [], finish="stop")
    assert (await rest(response)).endswith('"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')


async def test_headers_say_what_happened(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    async with router.session.post(
        router.url + "/v1/chat/completions", json={**HI, "stream": True}, headers={"x-request-id": "mine-1"}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-kvmesh-path"] == "prefill+decode"
        assert response.headers["x-kvmesh-attempt"] == decoder.generates[0].attempt
        assert response.headers["x-kvmesh-tries"] == "1"
        assert response.headers["x-request-id"] == "mine-1"
        assert text_of(await response.text()) == TEXT


async def test_two_requests_with_one_client_id_are_two_attempts(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    for _ in range(2):
        headers = {"x-request-id": "same"}
        async with router.session.post(router.url + "/v1/chat/completions", json=HI, headers=headers) as response:
            assert response.status == 200
    first, second = decoder.generates
    assert first.attempt != second.attempt


async def test_a_label_that_could_break_a_header_is_not_used(router: Front) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    for label in ("a b", "x" * 200):
        headers = {"x-request-id": label}
        async with router.session.post(router.url + "/v1/chat/completions", json=HI, headers=headers) as response:
            assert response.headers["x-request-id"] != label


async def test_one_token_prompts_run_at_the_decoder_alone(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    body = {"model": "tiny", "prompt": [7], "max_tokens": 30}
    async with router.session.post(router.url + "/v1/completions", json=body) as response:
        assert response.headers["x-kvmesh-path"] == "decode"
    assert decoder.generates[0].prefiller is None
    assert decoder.generates[0].tokens == [7]


async def test_prompts_have_the_templates_tokens_and_completions_the_tokenizers(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    async with router.chat() as response:
        assert response.status == 200
    tokenizer = router.service.model.tokenizer
    assert (
        tokenizer.decode(decoder.generates[0].tokens, skip_special_tokens=False)
        == "<|bos|><|user|>hi<|end|>\n<|assistant|>"
    )
    assert decoder.generates[0].tokens.count(0) == 1, "one BOS"
    async with router.session.post(router.url + "/v1/completions", json={"model": "tiny", "prompt": "hi"}) as response:
        assert response.status == 200
    assert decoder.generates[1].tokens == tokenizer.encode("hi").ids


async def test_duplicates_are_dropped(router: Front) -> None:
    async def script(decoder: FakeDecoder, generate: Generate) -> None:
        await decoder.reply_to.reply(Accepted(generate.attempt))
        tokens = ids(TEXT)
        for i in range(len(tokens)):
            for _ in range(2):
                await decoder.emit(generate, max(0, i - 1), tokens[max(0, i - 1) : i + 1])
        await decoder.emit(generate, len(tokens), [], finish="stop")

    await router.mesh.decoder(script)
    await router.until_ready(2)
    async with router.chat(stream=True) as response:
        assert text_of(await response.text()) == TEXT


@pytest.mark.parametrize("lost", ["middle", "last"])
async def test_lost_tokens_are_an_error_and_never_a_cut_answer(router: Front, lost: str) -> None:
    decoder = await manual(router)
    tokens = ids(TEXT)
    request = asyncio.ensure_future(router.chat(stream=True))
    generate = await begin(router, decoder)
    await decoder.emit(generate, 0, tokens[:2])
    response = await request
    await next_event(response)
    if lost == "middle":
        await decoder.emit(generate, 3, tokens[3:])
    else:
        await decoder.emit(generate, len(tokens), [], finish="stop")
    *_, last = events(await rest(response))
    assert last.startswith("event: error {")
    assert "lost on the way" in json.loads(last.removeprefix("event: error "))["error"]["message"]
    await decoder.until(lambda: decoder.cancelled(generate))


async def test_a_status_that_is_ahead_shows_a_loss(router: Front) -> None:
    decoder = await manual(router)
    request = asyncio.ensure_future(router.chat(stream=True))
    generate = await begin(router, decoder)
    await decoder.emit(generate, 0, ids(TEXT)[:2])
    response = await request
    await decoder.status(generate.router, {generate.attempt: 2})
    await decoder.status(generate.router, {generate.attempt: 4})
    assert "2 token(s) were lost" in await rest(response)


async def test_a_decoder_that_forgot_the_attempt_is_noticed_by_its_status(router: Front) -> None:
    decoder = await manual(router)
    request = asyncio.ensure_future(router.chat(stream=True))
    generate = await begin(router, decoder)
    await decoder.emit(generate, 0, ids(TEXT)[:2])
    response = await request
    await decoder.status(generate.router, {})
    assert "does not know the attempt" in await rest(response)


async def test_a_loss_before_the_first_byte_is_another_attempt(router: Front) -> None:
    async def script(decoder: FakeDecoder, generate: Generate) -> None:
        if len(decoder.generates) == 1:
            await decoder.reply_to.reply(Accepted(generate.attempt))
            await decoder.emit(generate, 5, ids(TEXT)[5:])
        else:
            await saying(*ids(TEXT))(decoder, generate)

    decoder = await router.mesh.decoder(script)
    await router.until_ready(2)
    async with router.chat(stream=True) as response:
        assert response.status == 200
        assert text_of(await response.text()) == TEXT
        assert response.headers["x-kvmesh-attempt"] == decoder.generates[1].attempt
        assert response.headers["x-kvmesh-tries"] == "2"
    first, second = decoder.generates
    assert first.sampling == second.sampling, "the same seed: a retry gives the same output"
    await decoder.until(lambda: decoder.cancelled(first))


async def test_a_whole_answer_is_retried_even_after_tokens(router: Front) -> None:
    async def script(decoder: FakeDecoder, generate: Generate) -> None:
        if len(decoder.generates) == 1:
            await decoder.reply_to.reply(Accepted(generate.attempt))
            await decoder.emit(generate, 0, ids(TEXT)[:3], error="decode step: broke")
        else:
            await saying(*ids(TEXT))(decoder, generate)

    await router.mesh.decoder(script)
    await router.until_ready(2)
    status, body, _ = await router.answer()
    assert (status, body["choices"][0]["message"]["content"]) == (200, TEXT)


async def test_an_early_end_keeps_all_that_was_made(router: Front) -> None:
    await router.mesh.decoder(saying(ids(TEXT)[0]))
    await router.until_ready(2)
    async with router.chat(stream=True) as response:
        said = await response.text()
    assert text_of(said) == "the"
    assert events(said)[-1] == "[DONE]"
    status, body, _ = await router.answer()
    assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")


async def test_an_end_at_once_is_an_empty_answer_that_says_stop(router: Front) -> None:
    await router.mesh.decoder(saying())
    await router.until_ready(2)
    async with router.chat(stream=True) as response:
        said = await response.text()
    assert text_of(said) == ""
    assert json.loads(events(said)[-2])["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_ends_the_stream_and_cancels_the_attempt(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids(TEXT), finish=None))
    await router.until_ready(2)
    for stream in (True, False):
        async with router.chat(stream=stream, stop=["brown"]) as response:
            said = await response.text()
        text = text_of(said) if stream else json.loads(said)["choices"][0]["message"]["content"]
        assert text == "the quick "
        await decoder.until(lambda: decoder.cancelled(decoder.generates[-1]))


async def test_held_text_is_released_at_the_end(router: Front) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    async with router.chat(stream=True, stop=["fox jumps"]) as response:
        assert text_of(await response.text()) == TEXT


async def test_one_batch_serves_many_streams(router: Front) -> None:
    decoder = await router.mesh.decoder(accepting, max_batch=64)
    await router.until_ready(2)
    requests = [asyncio.ensure_future(router.chat(stream=True)) for _ in range(40)]
    await decoder.until(lambda: len(decoder.generates) == 40)
    me, at = decoder.ref, decoder.generates[0].router
    for i, token in enumerate(ids(TEXT)):
        emits = [Emit(attempt=g.attempt, index=i, tokens=[token]) for g in decoder.generates]
        await decoder.send(at, EmitBatch(decoder=me, router=at, emits=emits))
    ends = [Emit(attempt=g.attempt, index=len(ids(TEXT)), finish="stop") for g in decoder.generates]
    await decoder.send(at, EmitBatch(decoder=me, router=at, emits=ends))
    for request in requests:
        assert text_of(await rest(await request)) == TEXT


async def test_messages_about_nothing_are_counted_and_ignored(router: Front) -> None:
    decoder = await manual(router)
    status, _ = await router.ready()
    assert status == 200
    stray = Emit(attempt="f" * 32, index=0, tokens=[1])
    me = router.service.me
    await decoder.send(me, EmitBatch(decoder=decoder.ref, router=me, emits=[stray]))
    await decoder.send(me, EmitBatch(decoder=InstanceRef("ghost", 1), router=me, emits=[stray]))
    await decoder.status(me, {"f" * 32: 3})
    await router.until(lambda: router.service.relay.table.late == 2)


async def test_a_client_that_does_not_read_slows_nobody_and_gets_everything(router: Front) -> None:
    """Its tokens wait at the router as tokens; another stream goes on meanwhile."""
    decoder = await manual(router)
    host, port = router.url.removeprefix("http://").split(":")
    body = json.dumps({**HI, "stream": True, "max_tokens": 500}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    slow = socket.create_connection((host, int(port)))
    slow.sendall(head.encode() + body)
    first = await begin(router, decoder)
    token = ids("the")
    sent = 0
    for _ in range(400):
        emits = [Emit(attempt=first.attempt, index=sent + i, tokens=token) for i in range(100)]
        await decoder.send(first.router, EmitBatch(decoder=decoder.ref, router=first.router, emits=emits))
        sent += 100
    other = asyncio.ensure_future(router.chat(stream=True))
    second = await begin(router, decoder, 2)
    await saying_now(decoder, second)
    assert text_of(await rest(await other)) == TEXT
    await decoder.emit(first, sent, [], finish="stop")
    received = await asyncio.to_thread(read_all, slow)
    assert received.count(b"[DONE]") == 1
    assert received.count(b"the") == sent


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(20.0)
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    connection.close()
    return b"".join(pieces)


async def saying_now(decoder: FakeDecoder, generate: Generate) -> None:
    tokens = ids(TEXT)
    await decoder.emit(generate, 0, tokens)
    await decoder.emit(generate, len(tokens), [], finish="stop")


async def test_an_old_client_gets_a_stream_without_chunks(router: Front) -> None:
    """HTTP/1.0 knows no chunked encoding: the end of the connection is the end of the stream."""
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    host, port = router.url.removeprefix("http://").split(":")
    body = json.dumps({**HI, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def talk() -> bytes:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head + body)
        return read_all(connection)

    received = await asyncio.to_thread(talk)
    headers, _, said = received.partition(b"\r\n\r\n")
    assert b"200 OK" in headers
    assert text_of(said.decode()) == TEXT


async def test_connections_are_kept(router: Front) -> None:
    await router.mesh.decoder(saying(*ids(TEXT)))
    await router.until_ready(2)
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for stream in (True, False, True):
        body = json.dumps({**HI, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(5.0):
            headers = await reader.readuntil(b"\r\n\r\n")
            if stream:
                await reader.readuntil(b"data: [DONE]\n\n")
                assert await reader.readuntil(b"0\r\n\r\n") == b"\r\n0\r\n\r\n", "nothing follows it"
            else:
                length = int(headers.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()
