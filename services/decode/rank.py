"""A data parallel rank of a decoder: a pool and a batch of its own. All ranks step together (`services.decode.batch`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.decode.scheduler import DecodeScheduler
from services.decode.speculation import speculation_of
from shared.config import DecodeSettings
from shared.instance import Instance
from shared.kv.digests import PageDigests
from shared.kv.ledger import PagePool
from shared.transfer.interface import MemoryRegion


@dataclass(eq=False)
class DecodeRank:
    number: int
    pool: PagePool
    regions: Sequence[MemoryRegion]
    """One a tensor parallel rank, each of its heads of all of the pool's pages."""
    scheduler: DecodeScheduler
    digests: PageDigests | None = None
    """Of the pool, where what arrives is to be checked."""
    picked: int = 0
    """When it was last given a request, in admissions: equals take turns."""


def ranks_of(instance: Instance, settings: DecodeSettings) -> list[DecodeRank]:
    return [
        DecodeRank(
            number,
            pool,
            instance.regions[number * instance.tp : (number + 1) * instance.tp],
            DecodeScheduler(
                pool,
                instance.layout.page_size,
                max_batch=settings.max_batch,
                max_positions=instance.identity.max_positions,
                speculation=speculation_of(settings),
            ),
            instance.page_digests(number),
        )
        for number, pool in enumerate(instance.pools)
    ]
