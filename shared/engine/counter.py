"""The layer counter: one 64-bit number in a memfd, which the executor advances after each layer's attention and the
fabric's layer watcher waits on.

Bytes 0..7 hold the counter, little-endian, first 0, never decreasing. The writer adds 1 with release order and then wakes
every waiter of a *shared* futex on bytes 0..3 (its low half); a watcher reads it with acquire order, and everything that
was written into the KV region before the increment is visible to it. On CUDA a graph node writes the counter and nobody
wakes: there the watcher polls.
"""

from __future__ import annotations

import os

COUNTER_BYTES = 4096


def create_counter() -> int:
    """A new counter at 0: the memfd's descriptor, close-on-exec, owned by the caller."""
    fd = os.memfd_create("kvmesh-layer-counter")
    os.ftruncate(fd, COUNTER_BYTES)
    return fd
