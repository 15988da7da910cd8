"""Every byte of every target page is written exactly once, by a rank that holds it, for any two shardings."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.kv import plan
from shared.kv.nhd import nhd_runs
from shared.kv.shards import ShardRun, check_sharding, fit, heads_of, holders_of, layouts_fit, runs, shard_layout
from shared.layout import KvLayout

TP = st.sampled_from([1, 2, 4, 8])
ATTEMPT = st.binary(min_size=16, max_size=16).map(bytes.hex)
LAYOUTS = st.one_of(
    st.builds(
        KvLayout,
        num_layers=st.just(2),
        num_kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
        head_dim=st.integers(1, 4),
        page_size=st.integers(1, 3),
        dtype=st.sampled_from(["bfloat16", "float32"]),
    ),
    st.builds(
        KvLayout,
        num_layers=st.just(2),
        num_kv_heads=st.just(1),
        head_dim=st.integers(1, 9),
        page_size=st.integers(1, 3),
        dtype=st.just("bfloat16"),
        kind=st.just("mla"),
    ),
)

Byte = tuple[int, int, int]
"""Part, head of the whole model, byte in the head (its tokens in order): what a byte of a page is."""

Pages = Callable[[KvLayout, int, int], list[Byte]]


def layout(heads: int, kind: str = "gqa") -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=heads, head_dim=3, page_size=2, dtype="bfloat16", kind=kind)


def page_of(whole: KvLayout, tp: int, rank: int) -> list[Byte]:
    """What each byte of a rank's page is: `[k/v][head][token][dim]`, written out."""
    held = [head for head in range(whole.num_kv_heads) if rank * whole.num_kv_heads // tp <= head]
    held = held[: max(1, whole.num_kv_heads // tp)]
    return [(part, head, byte) for part in range(whole.parts) for head in held for byte in range(whole.head_bytes)]


def nhd_page_of(whole: KvLayout, tp: int, rank: int) -> list[Byte]:
    """The same in the order `[k/v][token][head][dim]`."""
    held = [head for head in range(whole.num_kv_heads) if rank * whole.num_kv_heads // tp <= head]
    held = held[: max(1, whole.num_kv_heads // tp)]
    row = whole.head_bytes // whole.page_size
    tokens = range(whole.page_size)
    return [
        (part, head, token * row + byte)
        for part in range(whole.parts)
        for token in tokens
        for head in held
        for byte in range(row)
    ]


@pytest.mark.parametrize(("arithmetic", "pages"), [(runs, page_of), (nhd_runs, nhd_page_of)], ids=["hnd", "nhd"])
@given(LAYOUTS, TP, TP, ATTEMPT)
def test_every_byte_once_by_a_rank_that_holds_it(
    arithmetic: Callable[[KvLayout, int, int, str], list[ShardRun]],
    pages: Pages,
    whole: KvLayout,
    source_tp: int,
    target_tp: int,
    attempt: str,
) -> None:
    sources = [pages(whole, source_tp, rank) for rank in range(source_tp)]
    targets: list[list[Byte | None]] = [[None] * shard_layout(whole, target_tp).page_bytes for _ in range(target_tp)]
    for run in arithmetic(whole, source_tp, target_tp, attempt):
        source, target = sources[run.source_rank], targets[run.target_rank]
        assert run.length > 0
        assert run.source_offset + run.length <= len(source)
        assert run.target_offset + run.length <= len(target)
        for i in range(run.length):
            assert target[run.target_offset + i] is None, "a byte is written twice"
            target[run.target_offset + i] = source[run.source_offset + i]
    assert targets == [pages(whole, target_tp, rank) for rank in range(target_tp)]


@given(st.integers(1, 12), st.integers(1, 24))
def test_holders_are_those_that_hold(heads: int, tp: int) -> None:
    assume(fit(heads, tp, tp))
    for head in range(heads):
        holding = [rank for rank in range(tp) if head in heads_of(heads, tp, rank)]
        assert list(holders_of(heads, tp, head)) == holding


def test_what_a_source_says_of_itself_costs_no_time() -> None:
    assert len(runs(layout(2), 2**40, 2, "a")) == 2


@given(LAYOUTS, TP, TP, ATTEMPT, ATTEMPT)
def test_both_sides_count_the_same(whole: KvLayout, source_tp: int, target_tp: int, one: str, other: str) -> None:
    found = runs(whole, source_tp, target_tp, one)
    assert found == runs(whole, source_tp, target_tp, one)
    assert len(found) == len(runs(whole, source_tp, target_tp, other)), "the number depends on what was drawn"
    pages = whole.pages_for(5)
    assert plan.expected_writes(whole, 6, len(found)) == pages * 2 * len(found) + 1


@given(LAYOUTS, TP, TP, ATTEMPT)
def test_runs_that_touch_are_one(whole: KvLayout, source_tp: int, target_tp: int, attempt: str) -> None:
    found = runs(whole, source_tp, target_tp, attempt)
    for a in found:
        for b in found:
            same = (a.source_rank, a.target_rank) == (b.source_rank, b.target_rank)
            touch = (a.source_offset + a.length, a.target_offset + a.length) == (b.source_offset, b.target_offset)
            assert not (same and touch)


@given(LAYOUTS, TP, TP, ATTEMPT)
def test_all_ranks_of_a_replica_set_have_the_same_sources(
    whole: KvLayout, source_tp: int, target_tp: int, attempt: str
) -> None:
    by_set: dict[range, set[tuple[tuple[int, int, int, int], ...]]] = {}
    found = runs(whole, source_tp, target_tp, attempt)
    for rank in range(target_tp):
        mine = tuple(
            (r.source_rank, r.source_offset, r.target_offset, r.length) for r in found if r.target_rank == rank
        )
        by_set.setdefault(heads_of(whole.num_kv_heads, target_tp, rank), set()).add(mine)
    assert all(len(sources) == 1 for sources in by_set.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_shardings_are_one_whole_page_a_rank(tp: int) -> None:
    page = shard_layout(layout(4), tp).page_bytes
    assert runs(layout(4), tp, tp, "a") == [
        ShardRun(source_rank=rank, target_rank=rank, source_offset=0, target_offset=0, length=page)
        for rank in range(tp)
    ]


@pytest.mark.parametrize(
    ("heads", "source_tp", "target_tp", "count"),
    [(4, 4, 1, 8), (4, 1, 4, 8), (4, 2, 4, 8), (4, 4, 2, 8), (2, 1, 8, 16), (2, 2, 8, 8), (2, 8, 2, 2), (4, 8, 4, 4)],
)
def test_k_and_v_are_two_runs_unless_they_are_the_whole_page(
    heads: int, source_tp: int, target_tp: int, count: int
) -> None:
    assert len(runs(layout(heads), source_tp, target_tp, "a")) == count


def test_a_latent_is_one_run_a_target_rank_from_one_source_and_over_many_attempts_from_all() -> None:
    drawn = set()
    for attempt in range(64):
        found = runs(layout(1, "mla"), 4, 2, f"{attempt:032x}")
        assert [run.target_rank for run in found] == [0, 1]
        assert len({run.source_rank for run in found}) == 1, "one replica set, one source"
        drawn.add(found[0].source_rank)
    assert drawn == {0, 1, 2, 3}


def test_replica_sets_of_one_target_draw_for_themselves() -> None:
    pairs = set()
    for attempt in range(256):
        by_target = {run.target_rank: run.source_rank for run in runs(layout(2), 8, 2, f"{attempt:032x}")}
        pairs.add((by_target[0], by_target[1]))
    assert pairs == {(a, b) for a in range(4) for b in range(4, 8)}


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (4, 3), (2, 3), (4, 0), (4, -1)])
def test_shardings_that_do_not_divide_the_heads_are_refused(heads: int, tp: int) -> None:
    assert not fit(heads, tp, tp)
    with pytest.raises(ValueError, match=f"tensor parallel {tp} and {heads} KV heads: one must divide the other"):
        check_sharding(heads, tp)
    with pytest.raises(ValueError, match="must divide"):
        runs(layout(heads), 1, tp, "a")
    with pytest.raises(ValueError, match="must divide"):
        runs(layout(heads), tp, 1, "a")


def test_shardings_fit_where_one_divides_the_other() -> None:
    assert fit(4, 8, 2)
    assert fit(4, 2, 8)
    assert fit(6, 6, 3)
    assert not fit(6, 2, 3)


def test_a_drafts_layers_follow_the_models_in_the_same_region() -> None:
    model = KvLayout(num_layers=3, num_kv_heads=1, head_dim=5, page_size=2, dtype="bfloat16", kind="mla")
    draft = layout(4)
    both = msgspec.structs.replace(model, draft=draft)
    assert both.groups == [model, draft]
    assert (both.all_layers, both.token_bytes) == (5, model.token_bytes + draft.token_bytes)
    assert both.region_bytes(7) == model.region_bytes(7) + draft.region_bytes(7)
    ends = [
        both.offset(layer, page, 7) + both.groups[both.group_of(layer)].page_bytes
        for layer in range(5)
        for page in range(7)
    ]
    begins = [both.offset(layer, page, 7) for layer in range(5) for page in range(7)]
    assert begins == [0, *ends[:-1]]
    assert ends[-1] == both.region_bytes(7)
    assert both.digest() not in (model.digest(), draft.digest())
    assert shard_layout(both, 2).draft == shard_layout(draft, 2)
    assert layouts_fit(both, 2, 4)
    assert not layouts_fit(msgspec.structs.replace(both, draft=layout(6)), 1, 4)


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({"page_size": 3}, "page_size or dtype"),
        ({"dtype": "float32"}, "page_size or dtype"),
        ({"draft": layout(1)}, "no draft of its own"),
    ],
)
def test_a_draft_that_does_not_go_with_the_model_is_no_layout(draft: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        msgspec.structs.replace(layout(2), draft=msgspec.structs.replace(layout(2), **draft))
