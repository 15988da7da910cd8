"""A KV region: memory that the main process, the executor and the fabric map at once."""

from __future__ import annotations

import fcntl
import mmap
import os


class KvRegion:
    """`nbytes` of zeroed shared memory in a memfd whose size is sealed. It takes memory only where it was written.

    `fd` is close-on-exec and owned by this object: pass it on (`pass_fds`), duplicate it, map it, but do not close it.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError("a region has at least one byte")
        self.nbytes = nbytes
        self.fd = os.memfd_create("kvmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            self.close()
            raise

    def map(self) -> mmap.mmap:
        """A shared, writable mapping of the whole region; the caller's to close. It outlives `close`."""
        return mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Idempotent. The memory goes when the last mapping and descriptor of any process does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
