"""What the fabric is compared with, in C: one thread's memcpy of pages, and pages over framed TCP. Compiled when first
used, with the machine's C compiler, into a temporary folder: it is no part of the product."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct header { uint64_t offset; uint32_t length; uint32_t immediate; };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static int read_all(int fd, void *into, size_t length) {
    for (char *at = into; length > 0;) {
        ssize_t got = read(fd, at, length);
        if (got <= 0 && !(got < 0 && errno == EINTR)) return -1;
        if (got > 0) { at += got; length -= got; }
    }
    return 0;
}

double copy_pages(char *target, const char *source, size_t arena, size_t page, double seconds) {
    double started = now(), spent;
    size_t moved = 0, at = 0;
    do {
        for (int i = 0; i < 64; ++i) {
            memcpy(target + at, source + at, page);
            at = at + 2 * page <= arena ? at + page : 0;
            moved += page;
        }
        spent = now() - started;
    } while (spent < seconds);
    return moved / spent;
}

/* Header and page in one writev. The last frame asks for an answer, so that what was sent has arrived. */
double send_pages(int fd, char *source, size_t arena, size_t page, double seconds) {
    double started = now();
    size_t moved = 0, at = 0;
    int last = 0;
    while (!last) {
        last = now() - started >= seconds;
        struct header header = {at, page, last};
        struct iovec parts[2] = {{&header, sizeof header}, {source + at, page}};
        size_t left = sizeof header + page;
        struct iovec *first = parts;
        int count = 2;
        while (left > 0) {
            ssize_t sent = writev(fd, first, count);
            if (sent < 0) { if (errno == EINTR) continue; return -1; }
            left -= sent;
            while (count > 0 && (size_t)sent >= first->iov_len) { sent -= first->iov_len; ++first; --count; }
            if (count > 0) { first->iov_base = (char *)first->iov_base + sent; first->iov_len -= sent; }
        }
        moved += page;
        at = at + 2 * page <= arena ? at + page : 0;
    }
    char answer;
    if (read_all(fd, &answer, 1) != 0) return -1;
    return moved / (now() - started);
}

void receive_pages(int fd, char *target, size_t arena) {
    struct header header;
    while (read_all(fd, &header, sizeof header) == 0) {
        if (header.length > arena || header.offset > arena - header.length) return;
        if (read_all(fd, target + header.offset, header.length) != 0) return;
        if (header.immediate && write(fd, "!", 1) != 1) return;
    }
}
"""


class Baseline:
    """The compiled functions. Calls release the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy, self._send, self._receive = library.copy_pages, library.send_pages, library.receive_pages
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._copy.restype = self._send.restype = ctypes.c_double
        self._copy.argtypes = [pointer, pointer, size, size, ctypes.c_double]
        self._send.argtypes = [ctypes.c_int, pointer, size, size, ctypes.c_double]
        self._receive.argtypes = [ctypes.c_int, pointer, size]
        self._receive.restype = None

    @classmethod
    def build(cls) -> Baseline:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "baseline.c"), Path(folder, "baseline.so")
            source.write_text(SOURCE)
            subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
            return cls(ctypes.CDLL(str(library)))

    def copy(self, source: mmap.mmap, target: mmap.mmap, page_bytes: int, seconds: float) -> float:
        """Bytes a second of one thread's memcpy, page by page through both arenas."""
        return float(self._copy(_base(target), _base(source), len(source), page_bytes, seconds))

    def send(self, fd: int, source: mmap.mmap, page_bytes: int, seconds: float) -> float:
        """Bytes a second to the peer's `receive`, until it has the last page."""
        rate = float(self._send(fd, _base(source), len(source), page_bytes, seconds))
        if rate < 0:
            raise OSError("the framed TCP peer is gone")
        return rate

    def receive(self, fd: int, target: mmap.mmap) -> None:
        """Reads pages into place until the sender hangs up."""
        self._receive(fd, _base(target), len(target))


def _base(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
