"""Everything ends: decoders that refuse, fall silent, die or are born again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from services.router.main import drain, running
from shared.config import RouterSettings
from shared.messages import Accepted, Generate, Load
from tests.broker import Broker
from tests.fake_mesh import LAYOUT, FakeDecoder, accepting, fake_mesh, refusing, saying, silent
from tests.front import HI, Client, Front, asked, events, front, ids, text_of
from tests.tiny_model import served_model

TEXT = "the quick brown fox"

QUICK = {"max_attempts": 1}


@pytest.fixture
async def router(nats: Broker) -> AsyncIterator[Front]:
    async with front(nats) as made:
        await made.mesh.prefiller()
        yield made


class TestRefusals:
    async def test_another_decoder_takes_it(self, router: Front) -> None:
        first = await router.mesh.decoder(
            refusing("busy"), "d0", load=Load(free_pages=1000, largest_free_pages=1000, total_pages=1000, step_s=0.001)
        )
        second = await router.mesh.decoder(saying(*ids(TEXT)), "d1")
        await router.until_ready(3)
        status, _, headers = await router.answer()
        assert status == 200
        assert headers["x-kvmesh-attempt"] == second.generates[0].attempt != first.generates[0].attempt
        assert first.cancels == second.cancels == [], "a refusal leaves nothing to cancel"

    async def test_all_busy_is_a_wait_that_a_heartbeat_ends(self, router: Front) -> None:
        decoder = await router.mesh.decoder(refusing("busy"))
        await router.until_ready(2)
        request = asyncio.ensure_future(router.answer())
        await asked(decoder)
        decoder.script = saying(*ids(TEXT))
        assert (await request)[0] == 200

    async def test_a_finish_makes_room_without_a_heartbeat(self, router: Front) -> None:
        decoder = await router.mesh.decoder(accepting, max_batch=1)
        await router.until_ready(2)
        router.mesh.alive.clear()
        first = asyncio.ensure_future(router.answer())
        generate = await asked(decoder)
        decoder.script = saying(*ids(TEXT))
        second = asyncio.ensure_future(router.answer())
        await router.until(lambda: len(router.service.relay.line) == 1)
        await decoder.emit(generate, 0, ids(TEXT), finish="stop")
        assert (await first)[0] == (await second)[0] == 200

    async def test_a_full_line_is_429_with_retry_after(self, nats: Broker) -> None:
        async with front(nats, max_queue=1) as router:
            await router.mesh.prefiller()
            await router.mesh.decoder(accepting, load=Load(free_pages=0, largest_free_pages=0, total_pages=100))
            await router.until_ready(2)
            waiting = asyncio.ensure_future(router.answer())
            await router.until(lambda: len(router.service.relay.line) == 1)
            status, body, headers = await router.answer()
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(headers["Retry-After"]) >= 1
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def test_a_wait_in_line_has_its_own_deadline(self, nats: Broker) -> None:
        async with front(nats, queue_timeout_s=0.2) as router:
            await router.mesh.prefiller()
            await router.mesh.decoder(refusing("busy"))
            await router.until_ready(2)
            status, _, headers = await router.answer()
            assert status == 429
            assert "Retry-After" in headers

    @pytest.mark.case("L3")
    async def test_an_invalid_request_is_the_clients_error_at_once(self, router: Front) -> None:
        decoder = await router.mesh.decoder(refusing("invalid", "the pool has 3 pages", retryable=False))
        await router.until_ready(2)
        status, body, _ = await router.answer()
        assert (status, body["error"]["message"]) == (400, "the pool has 3 pages")
        assert len(decoder.generates) == 1

    async def test_a_draining_decoder_is_left_alone(self, router: Front) -> None:
        draining = await router.mesh.decoder(
            refusing("draining"),
            "d0",
            load=Load(free_pages=1000, largest_free_pages=1000, total_pages=1000, step_s=0.001),
        )
        await router.mesh.decoder(saying(*ids(TEXT)), "d1")
        await router.until_ready(3)
        assert (await router.answer())[0] == (await router.answer())[0] == 200
        assert len(draining.generates) <= 2

    @pytest.mark.parametrize("code", ["mismatch", "duplicate", "unavailable"])
    async def test_what_always_fails_ends_after_so_many_attempts(self, router: Front, code: str) -> None:
        decoder = await router.mesh.decoder(refusing(code, "for a reason"))
        await router.until_ready(2)
        status, body, headers = await router.answer()
        assert status == 503
        assert "for a reason" in body["error"]["message"]
        assert "Retry-After" in headers
        assert len(decoder.generates) == 3
        assert len({g.attempt for g in decoder.generates}) == 3

    @pytest.mark.case("F1")
    async def test_a_failed_prefill_is_told_at_once(self, router: Front) -> None:
        async def script(decoder: FakeDecoder, generate: Generate) -> None:
            await decoder.reply_to.reply(Accepted(generate.attempt))
            await decoder.emit(generate, 0, [], error="prefill: the prompt broke it", retryable=False)

        decoder = await router.mesh.decoder(script)
        await router.until_ready(2)
        begin = asyncio.get_running_loop().time()
        status, body, _ = await router.answer()
        assert (status, body["error"]["message"]) == (500, "prefill: the prompt broke it")
        assert asyncio.get_running_loop().time() - begin < 1.0
        assert len(decoder.generates) == 1


class TestNobodyThere:
    @pytest.mark.case("A4")
    async def test_503_says_what_is_missing(self, nats: Broker) -> None:
        async with front(nats) as router:
            status, body, headers = await router.answer()
            assert (status, headers["Retry-After"]) == (503, "1")
            assert body["error"]["message"] == "no decode instance is there; no prefill instance is there"
            assert (await router.ready())[0] == 503
            await router.mesh.decoder(saying(*ids(TEXT)))
            await router.until_ready(1)
            assert (await router.answer())[1]["error"]["message"] == "no prefill instance is there"
            await router.mesh.prefiller()
            await router.until_ready(2)
            assert (await router.ready())[0] == 200
            assert (await router.answer())[0] == 200

    @pytest.mark.case("C3")
    async def test_a_pair_that_does_not_fit_is_named_with_both_values(self, router: Front) -> None:
        await router.mesh.decoder(saying(*ids(TEXT)), layout=msgspec.structs.replace(LAYOUT, page_size=64))
        await router.until_ready(2)
        status, body = await router.ready()
        assert status == 503
        assert "layout.page_size differs: prefiller has 16, decoder has 64" in body["reason"]
        assert body["mismatches"]
        status, body, _ = await router.answer()
        assert status == 503
        assert "prefiller has 16, decoder has 64" in body["error"]["message"]

    async def test_instances_that_were_there_before_the_router_are_found_at_once(self, nats: Broker) -> None:
        """They answer its question, whatever their heartbeat."""
        async with fake_mesh(nats) as mesh:
            await mesh.decoder(saying(*ids(TEXT)))
            await mesh.prefiller()
            mesh.alive.clear()
            async with front(nats) as router:
                await router.until_ready(2)
                assert (await router.answer())[0] == 200


class TestDecodersVanish:
    async def test_before_the_first_byte_another_one_answers(self, router: Front) -> None:
        first = await router.mesh.decoder(
            accepting, "d0", load=Load(free_pages=1000, largest_free_pages=1000, total_pages=1000, step_s=0.001)
        )
        await router.mesh.decoder(saying(*ids(TEXT)), "d1")
        await router.until_ready(3)
        request = asyncio.ensure_future(router.answer())
        await asked(first)
        await router.mesh.kill(first)
        status, body, _ = await request
        assert (status, body["choices"][0]["message"]["content"]) == (200, TEXT)

    async def test_after_the_first_byte_the_stream_ends_with_an_error(self, router: Front) -> None:
        decoder = await router.mesh.decoder(saying(*ids(TEXT)[:2], finish=None))
        await router.until_ready(2)
        client = await Client.ask(router, stream=True)
        await client.read_until(b"\n\n")
        await router.mesh.kill(decoder)
        said = await client.read_until(b"0\r\n\r\n")
        assert b"event: error" in said
        assert b"was silent for more than" in said
        assert b"[DONE]" not in said

    @pytest.mark.case("F3")
    async def test_a_new_incarnation_ends_the_old_ones_attempts_at_once(self, router: Front) -> None:
        old = await router.mesh.decoder(accepting, "d0")
        await router.until_ready(2)
        request = asyncio.ensure_future(router.answer())
        await asked(old)
        new = await router.mesh.decoder(saying(*ids(TEXT)), "d0")
        async with asyncio.timeout(0.7):
            assert (await request)[0] == 200
        assert new.generates[0].decoder == new.ref
        router.mesh.alive.remove(old)

    async def test_one_that_nobody_hears_of_is_not_waited_for(self, router: Front) -> None:
        """Its process is gone and its silence is not long enough yet: the broker says so, or it does not answer in time."""
        gone = await router.mesh.decoder(
            accepting, "d0", load=Load(free_pages=1000, largest_free_pages=1000, total_pages=1000, step_s=0.001)
        )
        await router.mesh.decoder(saying(*ids(TEXT)), "d1")
        await router.until_ready(3)
        await router.mesh.kill(gone)
        async with asyncio.timeout(5):
            assert (await router.answer())[0] == 200

    async def test_the_only_one_gone_is_503_within_seconds(self, router: Front) -> None:
        decoder = await router.mesh.decoder(accepting, "d0")
        await router.until_ready(2)
        await router.mesh.kill(decoder)
        status, body, _ = await router.answer()
        assert (status, body["error"]["message"]) == (503, "no decode instance is there")

    async def test_a_prefiller_that_dies_takes_only_waiting_prompts_with_it(self, router: Front) -> None:
        decoder = await router.mesh.decoder(saying(*ids(TEXT)[:2], finish=None))
        await router.until_ready(2)
        client = await Client.ask(router, stream=True)
        await client.read_until(b"\n\n")
        decoder.script = accepting
        waiting = asyncio.ensure_future(router.answer())
        generate = await asked(decoder, 2)
        (prefiller,) = [i for i in router.mesh.alive if i.announcement.role == "prefill"]
        await router.mesh.kill(prefiller)
        status, body, _ = await waiting
        assert status == 503
        assert "prefill" in body["error"]["message"]
        await decoder.until(lambda: decoder.cancelled(generate))
        await decoder.emit(decoder.generates[0], 2, ids(TEXT)[2:], finish="stop")
        assert b"[DONE]" in await client.read_until(b"0\r\n\r\n")

    async def test_one_that_never_answers_is_given_up_and_cancelled(self, nats: Broker) -> None:
        async with front(nats, **QUICK) as router:
            await router.mesh.prefiller()
            decoder = await router.mesh.decoder(silent)
            await router.until_ready(2)
            status, body, _ = await router.answer()
            assert status == 503
            assert "no answer in time" in body["error"]["message"]
            await decoder.until(lambda: len(decoder.cancels) == 1)

    async def test_a_lost_reply_does_not_lose_the_answer(self, router: Front) -> None:
        """Tokens say as much as a reply does."""

        async def script(decoder: FakeDecoder, generate: Generate) -> None:
            await decoder.emit(generate, 0, ids(TEXT), finish="stop")

        await router.mesh.decoder(script)
        await router.until_ready(2)
        assert (await router.answer())[0] == 200


class TestDeadlines:
    async def test_a_whole_answer_that_is_late_is_504_and_cancelled(self, nats: Broker) -> None:
        async with front(nats, request_timeout_s=0.3) as router:
            await router.mesh.prefiller()
            decoder = await router.mesh.decoder(accepting)
            await router.until_ready(2)
            status, body, _ = await router.answer()
            assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
            await decoder.until(lambda: len(decoder.cancels) == 1)
            assert decoder.generates[0].budget_s <= 0.3

    async def test_a_stream_that_is_late_ends_with_an_error(self, nats: Broker) -> None:
        async with front(nats, request_timeout_s=0.3) as router:
            await router.mesh.prefiller()
            await router.mesh.decoder(saying(*ids(TEXT)[:2], finish=None))
            await router.until_ready(2)
            async with router.chat(stream=True) as response:
                said = await response.text()
            assert text_of(said) == TEXT[: len(text_of(said))]
            assert "deadline_exceeded" in events(said)[-1]


async def test_a_router_that_ends_cancels_what_still_runs(nats: Broker) -> None:
    async with fake_mesh(nats) as mesh, aiohttp.ClientSession() as session:
        await mesh.prefiller()
        decoder = await mesh.decoder(saying(*ids(TEXT)[:2], finish=None))
        settings = RouterSettings(name="router", nats_url=nats.url, nats_token=nats.token, port=0)
        async with running(settings, served_model()) as (service, url):
            async with asyncio.timeout(5.0):
                while len(service.registry.instances) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            response = await session.post(url + "/v1/chat/completions", json={**HI, "stream": True})
            await response.content.readuntil(b"\n\n")
        await decoder.until(lambda: decoder.cancelled(decoder.generates[0]))
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_router_that_stops_lets_streams_end_and_takes_nothing_new(router: Front) -> None:
    decoder = await router.mesh.decoder(saying(*ids(TEXT)[:2], finish=None))
    await router.until_ready(2)
    client = await Client.ask(router, stream=True)
    await client.read_until(b"\n\n")
    draining = asyncio.create_task(drain(router.service))
    await router.until(lambda: router.service.draining)
    status, body, _ = await router.answer()
    assert (status, body["error"]["message"]) == (503, "this router is shutting down")
    assert (await router.ready())[0] == 503
    await decoder.emit(decoder.generates[0], 2, ids(TEXT)[2:], finish="stop")
    assert b"[DONE]" in await client.read_until(b"0\r\n\r\n")
    await draining
