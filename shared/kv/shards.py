"""Which bytes of which rank's page go to which rank: the arithmetic of two shardings of one layout. Pure.

Rank r of tensor parallel n holds the KV heads [r * H / n, (r + 1) * H / n) of H. Where n is above H it holds head r * H // n, and
the n / H ranks that hold the same head are a *replica set*. The latent of MLA is one head, so that all ranks are one replica set.
Each replica set of the target draws, for each head, one of the source ranks that hold it, from the attempt's id: over many
attempts every source rank, and so every NIC, has its share. How many runs there are does not depend on what is drawn.

A range of heads is one run in each part of a page (`KvLayout.parts`): one of K and one of V, which are a single run where both
ranks hold exactly that range, the whole page.
"""

from __future__ import annotations

import hashlib

import msgspec

from shared.layout import KvLayout


class ShardRun(msgspec.Struct, frozen=True, kw_only=True):
    """In every page of every layer of a group: `length` bytes at `source_offset` of the source rank's page go to `target_offset`
    of the target rank's."""

    source_rank: int
    target_rank: int
    source_offset: int
    target_offset: int
    length: int
    group: int = 0


def check_sharding(num_kv_heads: int, tp: int) -> None:
    """Raises `ValueError` where heads and ranks do not divide one another."""
    if not _divide(num_kv_heads, tp):
        raise ValueError(f"tensor parallel {tp} and {num_kv_heads} KV heads: one must divide the other")


def fit(num_kv_heads: int, source_tp: int, target_tp: int) -> bool:
    """Whether KV goes from the one sharding to the other: of heads and both sides' ranks, each two divide one another."""
    return _divide(num_kv_heads, source_tp) and _divide(num_kv_heads, target_tp) and _divide(source_tp, target_tp)


def layouts_fit(layout: KvLayout, source_tp: int, target_tp: int) -> bool:
    """`fit`, of the heads of every group."""
    return all(fit(group.num_kv_heads, source_tp, target_tp) for group in layout.groups)


def heads_of(num_kv_heads: int, tp: int, rank: int) -> range:
    """The KV heads that a rank holds."""
    first = rank * num_kv_heads // tp
    return range(first, first + max(1, num_kv_heads // tp))


def holders_of(num_kv_heads: int, tp: int, head: int) -> range:
    """The ranks that hold a KV head: one, or a replica set."""
    first = head * tp // num_kv_heads
    return range(first, first + max(1, tp // num_kv_heads))


def shard_layout(layout: KvLayout, tp: int) -> KvLayout:
    """The layout of one rank's pages, the same for every rank; `layout` is the whole model's. Raises `ValueError` as
    `check_sharding`."""
    check_sharding(layout.num_kv_heads, tp)
    draft = layout.draft and shard_layout(layout.draft, tp)
    return msgspec.structs.replace(layout, num_kv_heads=max(1, layout.num_kv_heads // tp), draft=draft)


def runs(layout: KvLayout, source_tp: int, target_tp: int, attempt: str) -> list[ShardRun]:
    """All runs of a page, over all ranks of the target, group by group; `layout` is the whole model's. Both sides compute them
    alike: the source to write them, the target to count them (`shared.kv.plan.expected_writes`). Raises `ValueError` as
    `check_sharding`."""
    return [
        msgspec.structs.replace(run, group=number) if number else run
        for number, group in enumerate(layout.groups)
        for run in _group_runs(group, source_tp, target_tp, attempt)
    ]


def _group_runs(layout: KvLayout, source_tp: int, target_tp: int, attempt: str) -> list[ShardRun]:
    check_sharding(layout.num_kv_heads, source_tp)
    check_sharding(layout.num_kv_heads, target_tp)
    found: list[ShardRun] = []
    for target in range(target_tp):
        wanted = heads_of(layout.num_kv_heads, target_tp, target)
        head = wanted.start
        while head < wanted.stop:
            source = _draw_source(layout.num_kv_heads, source_tp, wanted, head, attempt)
            held = heads_of(layout.num_kv_heads, source_tp, source)
            sent = range(head, min(held.stop, wanted.stop))
            found += _runs_of(layout, source, held, target, wanted, sent)
            head = sent.stop
    return found


def _draw_source(num_kv_heads: int, source_tp: int, wanted: range, head: int, attempt: str) -> int:
    """The same for every rank of the replica set that wants these heads. A digest, and not `random`, whose draws may change from
    one version of Python to another."""
    holders = holders_of(num_kv_heads, source_tp, head)
    drawn = hashlib.blake2b(f"{attempt} {wanted.start} {head}".encode(), digest_size=8).digest()
    return holders[int.from_bytes(drawn, "big") % len(holders)]


def _runs_of(layout: KvLayout, source: int, held: range, target: int, wanted: range, sent: range) -> list[ShardRun]:
    """The heads `sent`, of which both sides have all: a run in each part, or one that is the whole page."""
    size, whole = layout.head_bytes, held == wanted == sent
    parts = 1 if whole else layout.parts
    return [
        ShardRun(
            source_rank=source,
            target_rank=target,
            source_offset=(part * len(held) + sent.start - held.start) * size,
            target_offset=(part * len(wanted) + sent.start - wanted.start) * size,
            length=len(sent) * size * (layout.parts if whole else 1),
        )
        for part in range(parts)
    ]


def _divide(a: int, b: int) -> bool:
    """Whether one of them divides the other."""
    return min(a, b) > 0 and (a % b == 0 or b % a == 0)
