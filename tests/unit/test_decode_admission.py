"""A decoder takes or refuses at once; every refusal names why."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from services.decode.admission import Capacity, Room, choose, decide, pages_at_admission
from shared.layout import KvLayout
from shared.messages import (
    Announce,
    FabricEndpoint,
    Generate,
    InstanceRef,
    Load,
    ModelIdentity,
    RefusedReply,
    Sampling,
)

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=4, dtype="float32")
MODEL = ModelIdentity(name="m", digest="d", vocab_size=100, max_positions=64)
ME = InstanceRef("decode", 7)
PREFILLER = Announce(
    role="prefill",
    instance=InstanceRef("prefill", 9),
    state="ready",
    model=MODEL,
    layout=LAYOUT,
    fabric=FabricEndpoint("tcp", b""),
    max_batch=1,
    load=Load(free_pages=1, largest_free_pages=1, total_pages=1),
    http="",
)
GENERATE = Generate(
    attempt="a",
    router=InstanceRef("router", 1),
    decoder=ME,
    prefiller=PREFILLER,
    tokens=[1, 2, 3],
    sampling=Sampling(temperature=0),
    max_tokens=5,
    stop_token_ids=[],
    budget_s=10,
)
NOW = Capacity(
    me=ME,
    model=MODEL,
    layout=LAYOUT,
    tp=1,
    pool_pages=10,
    ranks=[Room(5, False, 0, 0)],
    waiting=0,
    max_waiting=4,
    draining=False,
    attempts=frozenset(),
)


def changed(struct, **fields):
    return msgspec.structs.replace(struct, **fields)


def capacity(**fields):
    return replace(NOW, **fields)


def room(**fields):
    return replace(NOW.ranks[0], **fields)


def test_takes_what_fits():
    assert decide(GENERATE, NOW) == 0
    assert decide(changed(GENERATE, tokens=[5], prefiller=None), NOW) == 0
    assert decide(changed(GENERATE, prefiller=changed(PREFILLER, tp=8)), capacity(tp=2)) == 0
    assert decide(GENERATE, capacity(ranks=[room(free_pages=0), room()])) == 1


@pytest.mark.parametrize(
    ("generate", "now", "code", "retryable", "names"),
    [
        (changed(GENERATE, decoder=InstanceRef("decode", 6)), NOW, "stale_incarnation", True, "0000000000000007"),
        (GENERATE, capacity(attempts=frozenset("a")), "duplicate", False, "already"),
        (changed(GENERATE, tokens=[]), NOW, "invalid", False, "empty"),
        (changed(GENERATE, max_tokens=-1), NOW, "invalid", False, "max_tokens"),
        (changed(GENERATE, tokens=[1] * 64), NOW, "invalid", False, "64 positions"),
        (changed(GENERATE, tokens=[1, 100]), NOW, "invalid", False, "0 to 99"),
        (changed(GENERATE, tokens=[1, -1]), NOW, "invalid", False, "0 to 99"),
        (changed(GENERATE, max_tokens=50), NOW, "invalid", False, "the pool has 10"),
        (changed(GENERATE, prefiller=None), NOW, "mismatch", True, "no prefiller"),
        (
            changed(GENERATE, prefiller=changed(PREFILLER, layout=changed(LAYOUT, page_size=8))),
            NOW,
            "mismatch",
            True,
            "page_size=8.*page_size=4",
        ),
        (
            changed(GENERATE, prefiller=changed(PREFILLER, model=changed(MODEL, digest="e"))),
            NOW,
            "mismatch",
            True,
            "prefiller has e, decoder has d",
        ),
        (
            changed(GENERATE, prefiller=changed(PREFILLER, tp=3)),
            capacity(tp=2),
            "mismatch",
            True,
            "prefiller has 3, decoder has 2, 1 KV heads",
        ),
        (GENERATE, capacity(draining=True), "draining", True, "leaving"),
        (GENERATE, capacity(waiting=4), "busy", True, "4 admitted"),
        (GENERATE, capacity(ranks=[room(free_pages=0)]), "busy", True, "1 page.s. are wanted; free are 0 of 10$"),
        (GENERATE, capacity(ranks=[room(starved=True)]), "busy", True, r"free are 5 of 10 \(which a preempted"),
        (
            changed(GENERATE, tokens=[1] * 8),
            capacity(ranks=[room(free_pages=2)] * 2),
            "busy",
            True,
            "2 of 10, 2 of 10$",
        ),
    ],
)
def test_refuses_naming_why(generate, now, code, retryable, names):
    refusal = decide(generate, now)
    assert isinstance(refusal, RefusedReply)
    assert (refusal.code, refusal.retryable, refusal.attempt) == (code, retryable, generate.attempt)
    import re

    assert re.search(names, refusal.reason)


@pytest.mark.parametrize(("prompt", "pages"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_the_first_growth_has_a_place(prompt, pages):
    assert pages_at_admission(LAYOUT, prompt) == pages


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        ([room(), room()], 0),
        ([room(attempts=1), room()], 1),
        ([room(free_pages=3), room(free_pages=4)], 1),
        ([room(free_pages=3), room(free_pages=4, attempts=1)], 0),
        ([room(picked=2), room(picked=1), room(picked=3)], 1),
        ([room(free_pages=1), room(free_pages=2, attempts=7)], 1),
        ([room(starved=True), room(attempts=7)], 1),
        ([room(free_pages=1), room(starved=True)], None),
    ],
)
def test_the_rank_with_room_and_the_least_load_takes_it(ranks, chosen):
    assert choose(ranks, 2) == chosen


def test_equal_ranks_take_turns():
    picked = [0, 0, 0]
    turns = []
    for turn in range(1, 7):
        turns.append(choose([room(picked=last) for last in picked], 1))
        picked[turns[-1]] = turn
    assert turns == [0, 1, 2, 0, 1, 2]
