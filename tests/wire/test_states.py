"""Each state of a request times each way in which it can end: told within a second, no page too early, nothing left, and the
right answer to the client."""

from __future__ import annotations

import asyncio
import json
from itertools import product

import pytest

from tests.front import events
from tests.states_rig import EXPECTED, PROMPT, Rig, rig

CHUNKS = 3
"""Of the prompt."""
DEADLINE_S = 0.6


# ---- into each state


async def queued_at_the_router(rig: Rig) -> None:
    await rig.set_room(False)
    await rig.until(lambda: all(not known.load.free_pages for known in rig.router.registry.decoders))
    rig.ask()
    await rig.until(lambda: len(rig.router.relay.line) == 1)


async def sent(rig: Rig) -> None:
    rig.decode.service.inbox.clear()
    rig.ask()
    await rig.until(lambda: len(rig.attempts) == 1)


async def admitted(rig: Rig) -> None:
    rig.prefill.service.inbox.clear()
    rig.ask()
    await rig.until(lambda: len(rig.decode.service._attempts) == 1)


async def queued_at_the_prefiller(rig: Rig) -> None:
    await rig.block_prefiller()
    rig.ask()
    await rig.until(lambda: rig.prefill.service._scheduler.queued == 2)


async def mid_chunk(rig: Rig) -> None:
    """The first of three layers is computed, and its writes may land."""
    rig.prefill.executor.hold_at = 1
    rig.prefill.executor.gate.clear()
    rig.ask()
    await rig.until(lambda: rig.prefill.executor.counter == 1)


async def between_chunks(rig: Rig) -> None:
    """The second one is armed, and nothing of it is computed."""
    rig.prefill.executor.close_at = 2
    rig.ask()
    await rig.until(lambda: len(rig.prefill.executor.steps) == 2)


async def last_writes_in_flight(rig: Rig) -> None:
    rig.hold_writes()
    rig.ask()
    await rig.until(lambda: len(rig.prefill.instance.fabric.transfers) == CHUNKS + 1)


async def tail_written(rig: Rig) -> None:
    """All has landed, which the prefiller does not know yet; the decoder's first step is held."""
    rig.decode.executor.gate.clear()
    await last_writes_in_flight(rig)
    for transfer in rig.prefill.instance.fabric.transfers:
        transfer.land_data()
    await rig.until(lambda: len(rig.decode.executor.steps) == 1)


async def is_running(rig: Rig) -> None:
    rig.decode.executor.close_at = 3
    rig.ask()
    await rig.answer.began.wait()
    await rig.until(lambda: len(rig.decode.executor.steps) == 3)


async def finished(rig: Rig) -> None:
    rig.ask()
    await rig.client


STATES = [
    queued_at_the_router,
    sent,
    admitted,
    queued_at_the_prefiller,
    mid_chunk,
    between_chunks,
    last_writes_in_flight,
    tail_written,
    is_running,
    finished,
]
STREAMING = [is_running, finished]
"""The client has bytes."""
BEYOND_THE_PREFILLER = [tail_written, is_running, finished]


# ---- out of each state


async def the_client_leaves(rig: Rig) -> None:
    rig.client.cancel()
    await asyncio.gather(rig.client, return_exceptions=True)
    await rig.until(lambda: not rig.attempts and not len(rig.router.relay.line) and not len(rig.router.relay.courier))


async def the_deadline_passes(rig: Rig) -> None:
    await rig.client
    await rig.until(lambda: not rig.attempts and not len(rig.router.relay.courier))


async def the_prefiller_is_lost(rig: Rig) -> None:
    await rig.lose(rig.prefill, rig.decode)


async def the_step_fails(rig: Rig) -> None:
    """The next one that the request has a part in."""
    computed = any(job.computed.is_set() for job in rig.prefill.service._running.values())
    later = computed or rig.answer.began.is_set() or rig.decode.executor.steps
    node = rig.decode if later else rig.prefill
    node.executor.fail_next("a bad step", token=None if later else PROMPT[-2])
    if rig.blocker is None:
        node.executor.fail_next("a bad step")
    await rig.open_all()


async def the_decoder_is_lost(rig: Rig) -> None:
    await rig.lose(rig.decode, rig.prefill)


ENDS = [the_client_leaves, the_deadline_passes, the_prefiller_is_lost, the_step_fails, the_decoder_is_lost]

IMPOSSIBLE = {(finished, the_step_fails): "there is no step left that it has a part in"}


def goes_on(state, end) -> bool:
    """What has its KV needs no prefiller any more, and what is over does not care."""
    return state is finished or (end is the_prefiller_is_lost and state in BEYOND_THE_PREFILLER)


def check_answer(rig: Rig, state, end) -> None:
    answer = rig.answer
    if goes_on(state, end):
        assert answer.whole
        said = [json.loads(event)["choices"][0]["text"] for event in events(answer.text)[:-1]]
        assert "".join(said) == EXPECTED
    elif end is the_client_leaves:
        assert "[DONE]" not in answer.text
    elif state in STREAMING:
        assert answer.failed, answer.text
    elif end is the_deadline_passes:
        assert answer.status == 504
    else:
        assert answer.status == 503, (answer.status, answer.text)
        if end is the_step_fails:
            assert "a bad step" in answer.text


def test_the_impossible_is_listed_with_its_reason():
    assert all(state in STATES and end in ENDS and reason for (state, end), reason in IMPOSSIBLE.items())
    assert len(IMPOSSIBLE) == 1, "what can be reached is tested, not listed"


POSSIBLE = [pair for pair in product(STATES, ENDS) if pair not in IMPOSSIBLE]


@pytest.mark.parametrize(("state", "end"), POSSIBLE, ids=lambda part: part.__name__)
@pytest.mark.case("L1", "L2", "L4", "L6", "F1", "F2")
async def test_every_end_of_every_state(state, end):
    """L1, L2, L4, L6, F1, F2: see the module."""
    settings = {"request_timeout_s": DEADLINE_S} if end is the_deadline_passes else {}
    async with rig(**settings) as made:
        await state(made)
        ids = [attempt.id for attempt in made.attempts]
        await end(made)
        if state is admitted and end in (the_client_leaves, the_deadline_passes):
            await made.until(lambda: not len(made.decode.service._attempts), within_s=1.0)
        if end is not the_step_fails:
            made.open_inboxes()
        if state is sent and end is not the_decoder_is_lost:
            await made.until(lambda: made.decode.service._admitted)
        if not goes_on(state, end):
            for attempt in ids:
                await made.until(lambda attempt=attempt: made.told(attempt), within_s=1.0)
        if state is last_writes_in_flight and not made.lost and end is not the_step_fails:
            assert made.pool.counts()["quarantined"] > 0, "a write can still land"
        await made.open_all()
        if end is not the_client_leaves:
            async with asyncio.timeout(5):
                await made.client
        check_answer(made, state, end)
        if made.blocker is not None and not made.lost:
            await made.stub.result(made.blocker)
        await made.until_idle()
        if not made.lost:
            for attempt in ids:
                await made.late_words(attempt)
            assert (await made.another()).whole
            await made.until_idle()
