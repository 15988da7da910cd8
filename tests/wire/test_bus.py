"""The bus against a real broker."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from shared.bus import Access, Bus
from shared.errors import BusError, ConfigError, NobodyListens


class Ping(msgspec.Struct, tag=True):
    n: int


class Pong(msgspec.Struct, tag=True):
    n: int


def connect(broker, name="test"):
    return Bus.connect(Access(url=broker.url, token=broker.token), name=name)


async def collect(bus, subject, kind=Ping):
    """The subject's messages, as a queue."""
    queue: asyncio.Queue = asyncio.Queue(100)

    async def put(message):
        queue.put_nowait(message)

    await bus.subscribe(subject, kind, put)
    await bus.flush()
    return queue


async def next_of(queue):
    async with asyncio.timeout(5):
        return await queue.get()


async def test_messages_come_in_order_and_typed(shared_broker):
    async with connect(shared_broker) as bus:
        queue = await collect(bus, "order")
        for n in range(50):
            await bus.publish("order", Ping(n))
        assert [(await next_of(queue)).body for _ in range(50)] == [Ping(n) for n in range(50)]


async def test_a_request_is_answered(shared_broker):
    async with connect(shared_broker) as bus:

        async def answer(message):
            await message.reply(Pong(message.body.n + 1))

        await bus.subscribe("ask", Ping, answer)
        assert await bus.request("ask", Ping(1), Pong, timeout_s=2) == Pong(2)


async def test_a_request_nobody_listens_to_fails_at_once(shared_broker):
    async with connect(shared_broker) as bus:
        with pytest.raises(NobodyListens, match="request on nowhere: nobody listens"):
            await bus.request("nowhere", Ping(1), Pong, timeout_s=30)


async def test_a_request_that_is_not_answered_ends_in_time(shared_broker):
    async with connect(shared_broker) as bus:
        await collect(bus, "silent")
        with pytest.raises(BusError, match="no answer in time"):
            await bus.request("silent", Ping(1), Pong, timeout_s=0.05)


async def test_a_malformed_answer_is_an_error(shared_broker):
    async with connect(shared_broker) as bus:

        async def answer(message):
            await message.reply(Ping(0))

        await bus.subscribe("wrong", Ping, answer)
        with pytest.raises(BusError, match="malformed answer"):
            await bus.request("wrong", Ping(1), Pong, timeout_s=2)


async def test_a_malformed_message_is_dropped_and_counted(shared_broker, caplog):
    async with connect(shared_broker) as bus:
        queue = await collect(bus, "mixed")
        await bus._client.publish("mixed", b"\xc1 not msgpack")
        await bus.publish("mixed", Pong(1))
        await bus.publish("mixed", Ping(2))
        assert (await next_of(queue)).body == Ping(2)
        assert bus.malformed == 2
    assert caplog.text.count("malformed message on mixed") == 2


async def test_a_failing_handler_does_not_end_the_subscription(shared_broker, caplog):
    async with connect(shared_broker) as bus:
        done = asyncio.Event()

        async def handler(message):
            if message.body.n == 1:
                raise ValueError("broken")
            done.set()

        await bus.subscribe("fails", Ping, handler)
        with caplog.at_level(logging.CRITICAL):
            await bus.publish("fails", Ping(1))
            await bus.publish("fails", Ping(2))
            async with asyncio.timeout(5):
                await done.wait()
        assert bus.failed == 1


async def test_the_trace_context_travels(shared_broker):
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1)))
    async with connect(shared_broker) as bus:
        queue = await collect(bus, "traced")
        with trace.use_span(span):
            await bus.publish("traced", Ping(1))
        await bus.publish("traced", Ping(2))
        first, second = await next_of(queue), await next_of(queue)
    assert trace.get_current_span(first.context).get_span_context().trace_id == 0xABC
    assert not trace.get_current_span(second.context).get_span_context().is_valid


async def test_while_the_broker_is_away_everything_fails_at_once_and_comes_back(nats):
    async with connect(nats) as bus:
        queue = await collect(bus, "again")
        back = asyncio.Event()
        bus.on_reconnect(back.set)
        nats.kill()
        async with asyncio.timeout(5):
            while bus.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(BusError):
            await bus.publish("again", Ping(1))
        with pytest.raises(BusError):
            await bus.request("again", Ping(1), Pong, timeout_s=0.2)
        nats.start()
        async with asyncio.timeout(5):
            await back.wait()
        await bus.flush()
        await bus.publish("again", Ping(2))
        assert (await next_of(queue)).body == Ping(2)


async def test_a_frozen_broker_is_noticed(nats):
    async with connect(nats) as bus:
        nats.freeze()
        try:
            async with asyncio.timeout(6):
                while bus.connected:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            nats.thaw()


async def test_a_broker_that_is_not_there_is_named():
    with pytest.raises(BusError, match=r"no broker at nats://127\.0\.0\.1:1\b"):
        async with Bus.connect(Access(url="nats://127.0.0.1:1"), timeout_s=0.3):
            pass


@pytest.mark.parametrize(
    "url", ["", "broker", "127.0.0.1:4222", "http://broker:4222", "nats://", "nats://broker:many", "nats://b:0"]
)
async def test_what_is_no_address_is_named(url):
    with pytest.raises(ConfigError, match=r"KVMESH_NATS_URL.*takes nats://HOST:PORT"):
        async with Bus.connect(Access(url=url)):
            pass


async def test_what_is_secret_in_an_address_is_not_said():
    with pytest.raises(ConfigError) as raised:
        async with Bus.connect(Access(url="http://me:secret@broker")):
            pass
    assert "secret" not in str(raised.value)


async def test_a_wrong_token_is_an_error_in_time(shared_broker):
    with pytest.raises(BusError, match="no broker at"):
        async with Bus.connect(Access(url=shared_broker.url, token="wrong"), timeout_s=1.0):
            pass
