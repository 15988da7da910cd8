"""The memory through which ranks work together: see `shared.models.collective`."""

from __future__ import annotations

import os

_RANK_BYTES = 128
_SLOT_BYTES = 1 << 20
"""Of one rank and turn: what is larger goes in several turns."""


def shared_bytes(ranks: int) -> int:
    """What `create_memory` makes for so many ranks."""
    return ranks * (_RANK_BYTES + 2 * _SLOT_BYTES)


def create_memory(ranks: int) -> int:
    """New zeroed memory: the memfd's descriptor, close-on-exec, owned by the caller."""
    fd = os.memfd_create("kvmesh-collective")
    os.ftruncate(fd, shared_bytes(ranks))
    return fd
