"""One rank's share of a model: which heads, which part of each feed-forward, which experts, which KV layout."""

from __future__ import annotations

import msgspec

from shared.errors import ModelError
from shared.layout import KvLayout
from shared.models.collective import Peers
from shared.models.config import ModelConfig


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Rank `rank` of the `ranks` of a tensor parallel group. Query heads, the inner dimension of feed-forwards and of every
    expert are split evenly, in the order of ranks; KV heads likewise, or one is kept by several ranks where there are fewer
    than ranks. With expert parallelism, `ep` above 1, the routed experts are not split: `ep_rank` has its share of them
    whole."""

    rank: int = 0
    ranks: int = 1
    ep_rank: int = 0
    ep: int = 1

    def part(self, size: int) -> slice:
        """This rank's share of `size` of something that divides."""
        return slice(size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks)

    def experts(self, count: int) -> range:
        """Which of `count` routed experts are here."""
        return range(count * self.ep_rank // self.ep, count * (self.ep_rank + 1) // self.ep)

    def kv_heads(self, heads: int) -> slice:
        """`[r*H/n, (r+1)*H/n)`; where n > H the one head r*H//n."""
        first = heads * self.rank // self.ranks
        return slice(first, first + max(1, heads // self.ranks))

    def config(self, whole: ModelConfig) -> ModelConfig:
        """What of `whole` this rank computes. Raises `ModelError` where something does not divide by the ranks."""
        self._check(whole)
        replace, n = msgspec.structs.replace, self.ranks
        experts = whole.experts and replace(
            whole.experts,
            intermediate=whole.experts.intermediate // (n if self.ep == 1 else 1),
            shared_intermediate=whole.experts.shared_intermediate // n,
        )
        return replace(
            whole,
            heads=whole.heads // n,
            kv_heads=_kv_heads(whole.kv_heads, n),
            intermediate=whole.intermediate // n,
            experts=experts,
        )

    def _check(self, config: ModelConfig) -> None:
        experts = config.experts
        sizes = {
            "attention heads": config.heads,
            "intermediate_size": config.intermediate,
            "moe_intermediate_size": experts.intermediate if experts and self.ep == 1 else 0,
            "shared experts' size": experts.shared_intermediate if experts else 0,
        }
        for name, size in sizes.items():
            if size % self.ranks:
                raise ModelError(f"tensor parallel {self.ranks}: takes a divisor of the model's {name}, {size}")
        if experts and experts.count % self.ep:
            raise ModelError(f"expert parallel {self.ep}: takes a divisor of the model's {experts.count} experts")


def shard_of(peers: Peers) -> Shard:
    """That of the rank whose peers they are."""
    tensor, experts = peers
    return Shard(
        rank=tensor.rank if tensor else 0,
        ranks=tensor.ranks if tensor else 1,
        ep_rank=experts.rank if experts else 0,
        ep=experts.ranks if experts else 1,
    )


def sharded_layout(whole: KvLayout, ranks: int) -> KvLayout:
    """The KV layout of each of `ranks` ranks. Raises `ModelError` where neither of KV heads and ranks
    divides the other."""
    draft = whole.draft and sharded_layout(whole.draft, ranks)
    return msgspec.structs.replace(whole, num_kv_heads=_kv_heads(whole.num_kv_heads, ranks), draft=draft)


def _kv_heads(heads: int, ranks: int) -> int:
    if heads % ranks and ranks % heads:
        raise ModelError(f"tensor parallel {ranks}: takes a divisor or a multiple of the {heads} KV heads")
    return max(1, heads // ranks)
