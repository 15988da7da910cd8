"""Which pages go when, and how many writes that makes: the arithmetic both sides of a transfer must agree on.

The last token of a prompt is not prefilled: a prompt of n tokens has n - 1 tokens of KV to move. A page is written once a
layer, in as many runs as the two shardings ask for (one, where both sides have one rank), with the chunk that fills it, or
with the prompt's last chunk when it stays part-filled; so the number of writes does not depend on how the prompt was cut into
chunks.
"""

from __future__ import annotations

from shared.kv.shards import shard_layout
from shared.layout import KvLayout


def prefill_tokens(prompt_tokens: int) -> int:
    """Tokens that the prefiller computes."""
    return max(prompt_tokens - 1, 0)


def expected_writes(layout: KvLayout, prompt_tokens: int, *runs: int) -> int:
    """Writes that an attempt's counter is armed with: pages x layers x `runs` of each group of layers, and the tail. `runs` are
    those of one page over all ranks (`shared.kv.shards.runs`), by group. 0 where nothing is prefilled."""
    tokens = prefill_tokens(prompt_tokens)
    each = sum(group.num_layers * count for group, count in zip(layout.groups, runs, strict=True))
    return layout.pages_for(tokens) * each + 1 if tokens else 0


def pages_of_chunk(start: int, end: int, total: int, page_size: int) -> range:
    """Page positions that the chunk [start, end) of `total` prefilled tokens completes."""
    last = -(-end // page_size) if end == total else end // page_size
    return range(start // page_size, last)


def kv_bytes(layout: KvLayout, prompt_tokens: int, tp: int) -> int:
    """Bytes that are written for a prompt to a target of `tp` ranks, without the tail: whole pages, all layers, all replicas."""
    pages = layout.pages_for(prefill_tokens(prompt_tokens))
    return pages * tp * sum(group.num_layers * group.page_bytes for group in shard_layout(layout, tp).groups)
