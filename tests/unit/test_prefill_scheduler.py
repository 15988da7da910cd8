"""Chunked prefill without I/O."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill import overlap
from services.prefill.job import Job
from services.prefill.scheduler import PrefillScheduler
from shared.kv.ledger import PagePool
from shared.layout import KvLayout
from shared.messages import FabricEndpoint, InstanceRef, Prefill, TailSlot

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=4, dtype="float32")


def job(name: str, prompt_tokens: int) -> Job:
    return Job(
        Prefill(
            attempt=name,
            prefiller=InstanceRef("prefill", 1),
            decoder=InstanceRef("decode", 2),
            fabric=FabricEndpoint("tcp", b""),
            layout=LAYOUT,
            num_pages=99,
            regions=[b""],
            pages=[],
            immediate=0,
            tail=TailSlot(b"", 0),
            tokens=list(range(prompt_tokens)),
            budget_s=10,
        )
    )


def scheduler(pages: int = 100, chunk: int = 8) -> tuple[PrefillScheduler, PagePool]:
    pool = PagePool(pages)
    return PrefillScheduler(pool, LAYOUT.page_size, chunk_tokens=chunk), pool


def shape(parts):
    return [(part.job.attempt, part.start, part.end) for part in parts]


def test_the_last_token_is_left_to_the_decoder():
    sched, _ = scheduler()
    sched.add(job("a", 6))
    assert sched.queued_tokens == 5
    assert shape(sched.plan()) == [("a", 0, 5)]


def test_a_long_prompt_is_cut_and_the_rest_of_a_chunk_goes_to_the_next():
    sched, _ = scheduler(chunk=8)
    long, short = job("long", 12), job("short", 4)
    sched.add(long)
    sched.add(short)
    first = sched.plan()
    assert shape(first) == [("long", 0, 8)]
    assert sched.apply(first) == []
    second = sched.plan()
    assert shape(second) == [("long", 8, 11), ("short", 0, 3)]
    assert sched.apply(second) == [long, short]
    assert sched.plan() == []
    assert sched.queued_tokens == 0


def test_nobody_overtakes_a_prompt_that_waits_for_pages():
    sched, pool = scheduler(pages=3)
    a, b, c = job("a", 9), job("b", 9), job("c", 3)
    for one in (a, b, c):
        sched.add(one)
    parts = sched.plan()
    assert shape(parts) == [("a", 0, 8)]
    sched.apply(parts)
    assert sched.plan() == [], "b waits for a's pages, which are being written; c does not overtake it"
    pool.release("a")
    assert shape(sched.plan()) == [("b", 0, 8)]


def test_removed_during_its_chunk():
    sched, _ = scheduler()
    one = job("a", 5)
    sched.add(one)
    parts = sched.plan()
    sched.remove(one)
    sched.remove(one)
    assert sched.apply(parts) == []
    assert sched.plan() == []


@given(st.lists(st.integers(2, 60), min_size=1, max_size=10), st.integers(1, 40), st.integers(15, 40))
def test_every_token_and_page_once_in_order(prompts, chunk, pages):
    """Over all chunks each job's tokens are computed once and in order, its pages completed once, within the budget."""
    sched, pool = scheduler(pages=pages, chunk=chunk)
    jobs = [job(str(i), n) for i, n in enumerate(prompts)]
    for one in jobs:
        sched.add(one)
    seen = {one.attempt: 0 for one in jobs}
    completed = {one.attempt: [] for one in jobs}
    while parts := sched.plan():
        assert sum(part.end - part.start for part in parts) <= chunk
        for part in parts:
            assert part.start == seen[part.job.attempt]
            assert len(pool.pages(part.job.attempt)) >= LAYOUT.pages_for(part.end)
            seen[part.job.attempt] = part.end
            completed[part.job.attempt] += part.completes(LAYOUT.page_size)
        for done in sched.apply(parts):
            pool.release(done.attempt)
        pool.check_integrity()
    for one in jobs:
        assert seen[one.attempt] == one.total
        assert completed[one.attempt] == list(range(LAYOUT.pages_for(one.total)))
    assert pool.free == pages


def test_overlap_of_a_transfer_under_its_forwards():
    found = overlap.measure([(10, 20), (15, 30), (95, 120)], [(0, 50), (60, 100)])
    assert (found.transfer_ns, found.hidden_ns, found.exposed_ns) == (45, 25, 20)
    assert found.hidden_ratio == 25 / 45


def test_overlap_of_nothing():
    assert overlap.measure([], [(0, 5)]) == overlap.Overlap(transfer_ns=0, hidden_ns=0, exposed_ns=0)
    assert overlap.measure([(3, 3)], [(0, 5)]).hidden_ratio == 1.0


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (min(p), max(p))), max_size=8)


@given(INTERVALS, INTERVALS)
def test_overlap_counts_each_point_once(transfers, forwards):
    def points(intervals):
        return {p for begin, end in intervals for p in range(begin, end)}

    found = overlap.measure(transfers, forwards)
    assert found.transfer_ns == len(points(transfers))
    assert found.hidden_ns == len(points(transfers) & points(forwards))
