"""The alternative order inside a page, for comparison: NHD, `[k/v][token][head][dim]`. kvmesh's pages are HND (`KvLayout`). Pure.

A range of heads is then one run in every token of each part, where HND has one in each part: `page_size` times the writes, each
that much shorter. Only a page that goes over whole is one write in both.
"""

from __future__ import annotations

from shared.kv.shards import ShardRun, runs, shard_layout
from shared.layout import KvLayout


def nhd_runs(layout: KvLayout, source_tp: int, target_tp: int, attempt: str) -> list[ShardRun]:
    """As `shards.runs`, with the same ranks drawn, of pages in NHD order. Raises `ValueError` as it does."""
    source, target = shard_layout(layout, source_tp), shard_layout(layout, target_tp)
    found: list[ShardRun] = []
    for run in runs(layout, source_tp, target_tp, attempt):
        whole = run.length == source.page_bytes == target.page_bytes
        found += [run] if whole else _by_token(run, source, target)
    return found


def _by_token(run: ShardRun, source: KvLayout, target: KvLayout) -> list[ShardRun]:
    """The heads of one part that `run` sends, token by token."""
    row = source.head_bytes // source.page_size
    part, first = divmod(run.source_offset // source.head_bytes, source.num_kv_heads)
    into = run.target_offset // target.head_bytes % target.num_kv_heads
    return [
        ShardRun(
            source_rank=run.source_rank,
            target_rank=run.target_rank,
            source_offset=(token * source.num_kv_heads + first) * row,
            target_offset=(token * target.num_kv_heads + into) * row,
            length=run.length // source.page_size,
        )
        for token in range(part * source.page_size, (part + 1) * source.page_size)
    ]
