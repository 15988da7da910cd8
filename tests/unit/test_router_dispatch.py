"""Pairing: least predicted time to first token, room first, equals in turn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router import dispatch
from services.router.dispatch import Need, NoPair, NoRoom, Pair, choose
from services.router.registry import Instance
from shared.messages import Load
from tests.fake_mesh import LAYOUT, announcement


def decoder(name: str = "d0", *, free: int = 1000, max_batch: int = 8, layout: Any = LAYOUT, **load: Any) -> Instance:
    full = Load(free_pages=free, largest_free_pages=free, total_pages=1000, **load)
    return Instance(announcement("decode", name, max_batch=max_batch, load=full, layout=layout), 0.0)


def prefiller(name: str = "p0", *, max_batch: int = 64, layout: Any = LAYOUT, **load: Any) -> Instance:
    full = Load(free_pages=1000, largest_free_pages=1000, total_pages=1000, **load)
    return Instance(announcement("prefill", name, max_batch=max_batch, load=full, layout=layout), 0.0)


def pick(
    decoders: list[Instance], prefillers: list[Instance], tokens: int = 100, now: float = 0.0
) -> tuple[str, str | None]:
    choice = choose(decoders, prefillers, Need(tokens, alone=tokens == 1), now)
    assert isinstance(choice, Pair), choice
    return choice.decoder.ref.name, None if choice.prefiller is None else choice.prefiller.ref.name


class Turns:
    """Chooses and reserves as the relay does."""

    def __init__(self, decoders: list[Instance], prefillers: list[Instance]) -> None:
        self.decoders, self.prefillers, self.turn = decoders, prefillers, 0

    def next(self, tokens: int = 100) -> Pair | NoRoom | NoPair:
        choice = choose(self.decoders, self.prefillers, Need(tokens), 0.0)
        if isinstance(choice, Pair):
            self.turn += 1
            dispatch.reserve(choice, f"a{self.turn}", tokens, self.turn)
        return choice


def test_the_shorter_queue_of_prompt_tokens_wins() -> None:
    busy = prefiller("busy", queued_prefill_tokens=4000, prefill_tokens_per_s=1000.0)
    idle = prefiller("idle", queued_prefill_tokens=100, prefill_tokens_per_s=1000.0)
    assert pick([decoder()], [busy, idle]) == ("d0", "idle")


def test_a_fast_prefiller_with_a_longer_queue_can_be_sooner() -> None:
    fast = prefiller("fast", queued_prefill_tokens=4000, prefill_tokens_per_s=10000.0)
    slow = prefiller("slow", queued_prefill_tokens=1000, prefill_tokens_per_s=1000.0)
    assert pick([decoder()], [slow, fast])[1] == "fast"


def test_the_length_of_the_prompt_itself_counts() -> None:
    """A short prompt goes where the queue is short, a long one where speed is."""
    fast = prefiller("fast", queued_prefill_tokens=2000, prefill_tokens_per_s=10000.0)
    slow = prefiller("slow", prefill_tokens_per_s=1000.0)
    assert pick([decoder()], [fast, slow], tokens=50)[1] == "slow"
    assert pick([decoder()], [fast, slow], tokens=5000)[1] == "fast"


def test_a_queue_shrinks_between_heartbeats() -> None:
    old = prefiller("old", queued_prefill_tokens=1000, prefill_tokens_per_s=1000.0)
    new = prefiller("new", queued_prefill_tokens=500, prefill_tokens_per_s=1000.0)
    new.heard_at = 1.0
    assert pick([decoder()], [old, new], now=1.0)[1] == "old"


def test_the_decoder_with_the_shorter_step_and_the_emptier_batch_wins() -> None:
    assert pick([decoder("slow", step_s=0.2), decoder("fast", step_s=0.02)], [prefiller()])[0] == "fast"
    assert pick([decoder("full", step_s=0.1, running=7), decoder("empty", step_s=0.1)], [prefiller()])[0] == "empty"


def test_a_place_in_a_full_batch_costs_a_wait() -> None:
    full = decoder("full", step_s=0.01, running=8)
    slow = decoder("slow", step_s=0.05)
    assert pick([full, slow], [prefiller()])[0] == "slow"


def test_pages_must_be_free_for_the_prompt_and_the_first_growth() -> None:
    exact = decoder("exact", free=LAYOUT.pages_for(161))
    short = decoder("short", free=LAYOUT.pages_for(161) - 1)
    assert pick([short, exact], [prefiller()], tokens=160)[0] == "exact"
    assert isinstance(choose([short], [prefiller()], Need(160), 0.0), NoRoom)


@pytest.mark.parametrize(
    ("free", "largest", "sent", "room"),
    [
        (8, 8, 0, 8),
        (8, 4, 0, 4),
        (8, 6, 4, 2),
        (16, 8, 8, 4),  # all of it from one pool: the other has its 8; evenly: 4 each
        (15, 8, 8, 4),
        (8, 8, 8, 0),
        (8, 4, 12, -2),
    ],
)
def test_a_request_must_fit_into_one_pool(free: int, largest: int, sent: int, room: int) -> None:
    load = Load(free_pages=free, largest_free_pages=largest, total_pages=20)
    instance = Instance(announcement("decode", "d", dp=2, load=load), 0.0)
    if sent:
        instance.tally.send("before", dispatch.Share(0, sent))
    tokens = LAYOUT.page_size * max(room, 0) - 1
    if room > 0:
        assert dispatch.decoder_has_room(instance, Need(tokens))
    assert not dispatch.decoder_has_room(instance, Need(tokens + 1))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=12), st.randoms())
def test_what_is_said_to_be_free_in_a_pool_is_wherever_the_rest_went(
    pools: list[int], requests: list[int], random: Any
) -> None:
    load = Load(free_pages=sum(pools), largest_free_pages=max(pools), total_pages=12 * len(pools))
    instance = Instance(announcement("decode", "d", dp=len(pools), load=load), 0.0)
    left = list(pools)
    for number, pages in enumerate(requests):
        fitting = [i for i, free in enumerate(left) if free >= pages]
        if not fitting:
            break
        left[random.choice(fitting)] -= pages
        instance.tally.send(str(number), dispatch.Share(0, pages))
    assert dispatch._free_in_a_pool(instance) <= max(left)


def test_what_was_just_sent_counts_before_the_next_heartbeat() -> None:
    turns = Turns([decoder("a", max_batch=2), decoder("b", max_batch=2)], [prefiller()])
    chosen = [turns.next() for _ in range(5)]
    assert Counter(c.decoder.ref.name for c in chosen if isinstance(c, Pair)) == {"a": 2, "b": 2}
    assert isinstance(chosen[4], NoRoom)


def test_prompt_tokens_just_sent_count_too() -> None:
    turns = Turns([decoder(max_batch=64)], [prefiller("p"), prefiller("q")])
    first, second, third = (turns.next(tokens) for tokens in (3000, 100, 100))
    assert isinstance(first, Pair)
    assert isinstance(second, Pair)
    assert isinstance(third, Pair)
    assert first.prefiller is not second.prefiller
    assert third.prefiller is second.prefiller


def test_equals_take_turns() -> None:
    turns = Turns([decoder(n, max_batch=1000) for n in "abc"], [prefiller(n) for n in "pq"])
    chosen = []
    for _ in range(12):
        pair = turns.next(1)
        assert isinstance(pair, Pair)
        chosen.append(pair.decoder.ref.name)
        pair.decoder.tally.end(f"a{turns.turn}")
    assert Counter(chosen) == {"a": 4, "b": 4, "c": 4}


def test_equals_of_different_shardings_take_turns_too() -> None:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=4)
    load = Load(free_pages=1000, largest_free_pages=1000, total_pages=1000)

    def sharded(role: Any, name: str, tp: int) -> Instance:
        return Instance(announcement(role, name, layout=layout, tp=tp, load=load, max_batch=1000), 0.0)

    turns = Turns(
        [sharded("decode", "a", 1), sharded("decode", "b", 2), sharded("decode", "c", 2)],
        [sharded("prefill", "p", 1), sharded("prefill", "q", 4)],
    )
    decoders, prefillers = Counter[str](), Counter[str]()
    for _ in range(12):
        pair = turns.next(2)
        assert isinstance(pair, Pair)
        assert pair.prefiller is not None
        decoders[pair.decoder.ref.name] += 1
        prefillers[pair.prefiller.ref.name] += 1
        dispatch.release(pair, f"a{turns.turn}")
    assert decoders == {"a": 4, "b": 4, "c": 4}
    assert prefillers == {"p": 6, "q": 6}


def test_a_prompt_of_one_token_needs_no_prefiller() -> None:
    assert pick([decoder()], [], tokens=1) == ("d0", None)
    choice = choose([decoder()], [prefiller()], Need(1, alone=True), 0.0)
    assert isinstance(choice, Pair)
    assert choice.path == "decode"


def test_nobody_there_is_said_apart_from_nobody_free() -> None:
    assert choose([], [prefiller()], Need(5), 0.0) == NoPair("no decode instance is ready")
    assert choose([decoder()], [], Need(5), 0.0) == NoPair("no prefill instance is ready")
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    assert isinstance(choose([decoder()], [prefiller(layout=other)], Need(5), 0.0), NoPair)
    assert isinstance(choose([decoder(running=100)], [prefiller()], Need(5), 0.0), NoRoom)
    assert isinstance(choose([decoder()], [prefiller(waiting=64)], Need(5), 0.0), NoRoom)


def test_only_those_that_fit_are_paired() -> None:
    other = msgspec.structs.replace(LAYOUT, page_size=32)
    decoders = [decoder("d16"), decoder("d32", layout=other, step_s=0.001)]
    assert pick(decoders, [prefiller("p16")]) == ("d16", "p16")
    assert pick(decoders, [prefiller("p32", layout=other)]) == ("d32", "p32")


def test_one_that_refused_as_busy_is_left_alone_until_its_heartbeat() -> None:
    full = decoder("full")
    full.full = True
    assert isinstance(choose([full], [prefiller()], Need(5), 0.0), NoRoom)
    full.renew(full.announce, 1.0)
    assert pick([full], [prefiller()], tokens=5)[0] == "full"


def test_one_that_refused_gets_one_at_a_time_until_it_takes_one() -> None:
    wary = decoder("wary")
    wary.refused()
    wary.renew(wary.announce, 1.0)
    turns = Turns([wary], [prefiller()])
    first = turns.next()
    assert isinstance(first, Pair)
    assert isinstance(turns.next(), NoRoom)
    dispatch.taken(first, "a1")
    assert isinstance(turns.next(), Pair)
    assert isinstance(turns.next(), Pair)


@pytest.mark.parametrize("failed", ["decoder", "prefiller"])
def test_one_that_is_half_open_gets_one_at_a_time_until_a_token_comes(failed: str) -> None:
    there = {"decoder": decoder(), "prefiller": prefiller()}
    there[failed].half_open = True
    turns = Turns([there["decoder"]], [there["prefiller"]])
    first = turns.next()
    assert isinstance(first, Pair)
    assert isinstance(turns.next(), NoRoom)
    dispatch.taken(first, "a1")
    assert isinstance(turns.next(), NoRoom), "that it was taken shows nothing yet"
    dispatch.release(first, "a1")
    second = turns.next()
    assert isinstance(second, Pair), "the first one failed: the next one tries"
    dispatch.release(first, "a1")
    assert isinstance(turns.next(), NoRoom), "what is over frees no other's place"
    dispatch.prefilled(second, "a2")
    assert isinstance(turns.next(), Pair)
    assert isinstance(turns.next(), Pair)


def test_another_one_is_used_while_one_is_half_open() -> None:
    fast, other = decoder("fast", step_s=0.001), decoder("other")
    fast.half_open = True
    turns = Turns([fast, other], [prefiller()])
    names = [
        choice.decoder.ref.name for choice in (turns.next(), turns.next(), turns.next()) if isinstance(choice, Pair)
    ]
    assert names == ["fast", "other", "other"]


def test_a_request_avoids_where_it_failed_until_that_is_heard_of_again() -> None:
    failed, other = decoder("failed", step_s=0.001), decoder("other")
    need = Need(5, {failed.ref: failed.beats})
    choice = choose([failed, other], [prefiller()], need, 0.0)
    assert isinstance(choice, Pair)
    assert choice.decoder is other
    alone = choose([failed], [prefiller()], need, 0.0)
    assert isinstance(alone, NoRoom)
    assert alone.personal
    failed.renew(failed.announce, 1.0)
    assert isinstance(choose([failed], [prefiller()], need, 0.0), Pair)


def test_some_are_prefilled_ahead_of_a_place_in_a_large_batch() -> None:
    assert dispatch.decoder_has_room(decoder(max_batch=8, running=9), Need(5))
    assert not dispatch.decoder_has_room(decoder(max_batch=8, running=10), Need(5))
    assert not dispatch.decoder_has_room(decoder(max_batch=2, running=2), Need(5))


loads = st.builds(
    lambda running, free, step: {"running": running, "free": free, "step_s": step},
    st.integers(0, 12),
    st.integers(0, 60),
    st.one_of(st.none(), st.floats(0.001, 1.0)),
)


@given(
    st.lists(loads, min_size=1, max_size=5), st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.integers(1, 800)
)
def test_what_is_chosen_has_room_and_is_the_least_within_a_tie(
    decode: list[dict[str, Any]], queues: list[int], tokens: int
) -> None:
    decoders = [decoder(f"d{i}", **load) for i, load in enumerate(decode)]
    prefillers = [prefiller(f"p{i}", queued_prefill_tokens=q) for i, q in enumerate(queues)]
    choice = choose(decoders, prefillers, Need(tokens), 0.0)
    open_ = [d for d in decoders if dispatch.decoder_has_room(d, Need(tokens))]
    if not open_:
        assert isinstance(choice, NoRoom)
        return
    assert isinstance(choice, Pair)
    assert choice.decoder in open_
    best = min(dispatch.decode_wait_s(d) for d in open_)
    assert dispatch.decode_wait_s(choice.decoder) <= best * dispatch.TIE_RATIO + dispatch.TIE_S
    if tokens > 1:
        assert choice.prefiller is not None
        least = min(dispatch.prefill_wait_s(p, tokens, 0.0) for p in prefillers)
        chosen = dispatch.prefill_wait_s(choice.prefiller, tokens, 0.0)
        assert chosen <= least * dispatch.TIE_RATIO + dispatch.TIE_S


def test_a_release_is_complete_and_idempotent() -> None:
    d, p = decoder(), prefiller()
    pair = Pair(d, p)
    dispatch.reserve(pair, "a", 100, 1)
    assert (d.tally.requests, d.tally.pages, p.tally.tokens) == (1, LAYOUT.pages_for(101), 99)
    dispatch.prefilled(pair, "a")
    assert p.tally.tokens == 0
    for _ in range(2):
        dispatch.release(pair, "a")
        assert (d.tally.requests, d.tally.pages, p.tally.tokens, p.tally.requests) == (0, 0, 0, 0)


def test_shardings_that_fit_are_paired_whichever_is_sooner_and_others_never() -> None:
    layout = msgspec.structs.replace(LAYOUT, num_kv_heads=6)

    def sharded(role: Any, name: str, tp: int, **load: Any) -> Instance:
        full = Load(free_pages=1000, largest_free_pages=1000, total_pages=1000, **load)
        return Instance(announcement(role, name, layout=layout, tp=tp, load=full), 0.0)

    two, three = sharded("prefill", "two", 2), sharded("prefill", "three", 3, queued_prefill_tokens=5000)
    assert pick([sharded("decode", "one", 1)], [two, three]) == ("one", "two")
    assert pick([sharded("decode", "six", 6)], [two, three]) == ("six", "two")
    assert pick([sharded("decode", "three", 3)], [two, three]) == ("three", "three")
    assert isinstance(choose([sharded("decode", "three", 3)], [two], Need(10), 0.0), NoPair)
