"""The ledger balances after every step of any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import AttemptFailed
from shared.kv import plan, tail
from shared.kv.ledger import STATES, PagePool
from shared.kv.slots import SlotPool
from shared.layout import KvLayout

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "mark", "mark_part", "release"]),
        st.sampled_from("abcd"),
        st.integers(0, 9),
        st.sampled_from([s for s in STATES if s != "free"]),
    ),
    max_size=60,
)


@given(STEPS)
def test_balances_after_every_step(steps):
    pool = PagePool(16)
    for what, owner, count, state in steps:
        before = pool.free
        match what:
            case "reserve":
                taken = pool.reserve(owner, count, state)
                assert (taken is None) == (count > before)
            case "mark":
                pool.mark(owner, state)
            case "mark_part":
                pool.mark(owner, state, count // 2, count)
            case "release":
                held = len(pool.pages(owner))
                assert pool.release(owner) == held
                assert pool.release(owner) == 0
        pool.check_integrity()


def test_a_refused_reservation_takes_nothing():
    pool = PagePool(4)
    assert pool.reserve("a", 3) == [0, 1, 2]
    assert pool.reserve("b", 2) is None
    assert pool.counts() == {"free": 1, "cached": 0, "reserved": 3, "in_transit": 0, "running": 0, "quarantined": 0}
    assert pool.owners() == ["a"]


def test_a_freed_page_rests_longest():
    pool = PagePool(3)
    pool.reserve("a", 1)
    pool.release("a")
    assert pool.reserve("b", 3) == [1, 2, 0]


@pytest.mark.parametrize("damage", ["_state", "_held", "_free", "_counts"])
def test_integrity_notices_damage(damage):
    pool = PagePool(4)
    pool.reserve("a", 2)
    match damage:
        case "_state":
            pool._state[0] = "free"
        case "_held":
            pool._held["b"] = [0]
        case "_free":
            pool._free.popleft()
        case "_counts":
            pool._counts["free"] += 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_slots_never_share_an_immediate_in_a_row():
    slots = SlotPool(2)
    first, second = slots.take(), slots.take()
    assert first is not None
    assert second is not None
    assert slots.take() is None
    slots.give_back(first)
    again = slots.take()
    assert again is not None
    assert (again.index, again.tail_offset) == (first.index, first.tail_offset)
    assert len({first.immediate, second.immediate, again.immediate}) == 3
    slots.check_integrity()


@given(st.integers(1, 400), st.integers(1, 70), st.lists(st.integers(1, 90), min_size=1, max_size=60))
def test_every_page_is_written_once_however_the_prompt_is_cut(prompt, page_size, cuts):
    layout = KvLayout(num_layers=3, num_kv_heads=1, head_dim=8, page_size=page_size, dtype="float32")
    total = plan.prefill_tokens(prompt)
    written, start, i = [], 0, 0
    while start < total:
        end = min(start + cuts[i % len(cuts)], total)
        written.extend(plan.pages_of_chunk(start, end, total, page_size))
        start, i = end, i + 1
    assert written == list(range(layout.pages_for(total)))
    assert plan.expected_writes(layout, prompt, 1) == (len(written) * 3 + 1 if total else 0)


GOOD = tail.Tail("00112233445566778899aabbccddeeff", 7, 10, 1, 31)


def test_tail_round_trip():
    assert len(GOOD.pack()) == tail.HEADER_BYTES == 48
    tail.check(GOOD.pack(), GOOD)


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempt", "ff" * 16), ("layout_digest", 8), ("tokens", 11), ("pages", 2), ("writes", 30), ("payload_bytes", 4)],
)
def test_a_tail_of_another_attempt_is_refused(field, value):
    import msgspec

    with pytest.raises(AttemptFailed, match=field.replace("_", " ")):
        tail.check(msgspec.structs.replace(GOOD, **{field: value}).pack(), GOOD)


def test_an_empty_slot_is_refused():
    with pytest.raises(AttemptFailed, match="magic"):
        tail.check(bytes(tail.SLOT_BYTES), GOOD)
