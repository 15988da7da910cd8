"""One rank's share of a model under tensor parallelism: which heads, which part of each feed-forward, which KV layout."""

from __future__ import annotations

import msgspec

from shared.errors import ModelError
from shared.layout import KvLayout
from shared.models.config import ModelConfig


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Rank `rank` of `ranks`. Query heads, the inner dimension of feed-forwards and of every expert are split evenly, in the
    order of ranks; KV heads likewise, or one is kept by several ranks where there are fewer than ranks."""

    rank: int = 0
    ranks: int = 1

    def part(self, size: int) -> slice:
        """This rank's share of `size` of something that divides."""
        return slice(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)

    def kv_heads(self, heads: int) -> slice:
        """`[r*H/n, (r+1)*H/n)`; where n > H the one head r*H//n."""
        first = heads * self.rank // self.ranks
        return slice(first, first + max(1, heads // self.ranks))

    def config(self, whole: ModelConfig) -> ModelConfig:
        """What of `whole` this rank computes. Raises `ModelError` where something does not divide by the ranks."""
        _check(whole, self.ranks)
        replace, n = msgspec.structs.replace, self.ranks
        experts = whole.experts and replace(
            whole.experts,
            intermediate=whole.experts.intermediate // n,
            shared_intermediate=whole.experts.shared_intermediate // n,
        )
        return replace(
            whole,
            heads=whole.heads // n,
            kv_heads=_kv_heads(whole.kv_heads, n),
            intermediate=whole.intermediate // n,
            experts=experts,
        )


def sharded_layout(whole: KvLayout, ranks: int) -> KvLayout:
    """The KV layout of each of `ranks` ranks. Raises `ModelError` where neither of KV heads and ranks
    divides the other."""
    return msgspec.structs.replace(whole, num_kv_heads=_kv_heads(whole.num_kv_heads, ranks))


def _kv_heads(heads: int, ranks: int) -> int:
    if heads % ranks and ranks % heads:
        raise ModelError(f"tensor parallel {ranks}: takes a divisor or a multiple of the {heads} KV heads")
    return max(1, heads // ranks)


def _check(config: ModelConfig, ranks: int) -> None:
    experts = config.experts
    sizes = {
        "attention heads": config.heads,
        "intermediate_size": config.intermediate,
        "moe_intermediate_size": experts.intermediate if experts else 0,
        "shared experts' size": experts.shared_intermediate if experts else 0,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise ModelError(f"tensor parallel {ranks}: takes a divisor of the model's {name}, {size}")
