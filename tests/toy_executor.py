"""An executor without a model: its "K and V" are the token ids themselves, written into the real pages of a real memfd, and
its next token is a function of all that it reads back. A page that was lost, doubled, reordered or overwritten shows in the
output; a layer that was not transferred raises."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import struct
import time
from array import array

from shared.engine.counter import create_counter
from shared.engine.protocol import Row, Step, StepDone
from shared.errors import ExecutorDied, StepFailed
from shared.layout import KvLayout

_FUTEX_WAKE = 1
_SYS_FUTEX = 202


def toy_next(tokens: list[int], vocab: int = 97) -> int:
    """1 to vocab - 1; depends on every token and its place."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) % (vocab - 1) + 1


def toy_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What the toy model says to a prompt, run whole."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(toy_next(tokens))
    return tokens[len(prompt) :]


class ToyExecutor:
    """`gate` must be set for a step to run; `fail_next` makes one raise; `kill()` ends it as a dead process would."""

    def __init__(self, layout: KvLayout, num_pages: int) -> None:
        assert layout.dtype == "float32"
        self.layout = layout
        self.num_pages = num_pages
        self.kv_bytes = layout.region_bytes(num_pages)
        self.kv_fd = os.memfd_create("toy-kv")
        os.ftruncate(self.kv_fd, self.kv_bytes)
        self.counter_fd = create_counter()
        self.kv = mmap.mmap(self.kv_fd, self.kv_bytes)
        self._counter_map = mmap.mmap(self.counter_fd, 4096)
        self._word = ctypes.c_char.from_buffer(self._counter_map)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.counter = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.fail_next: str | None = None
        self.steps: list[Step] = []
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def step(self, step: Step, *, timeout_s: float) -> StepDone:
        self.steps.append(step)
        self.entered.set()
        begin = time.monotonic_ns()
        gate = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait({gate, self._dead}, return_when=asyncio.FIRST_COMPLETED)
        gate.cancel()
        if self._dead.done():
            self._dead.result()
        if self.fail_next is not None:
            detail, self.fail_next = self.fail_next, None
            raise StepFailed(step.step, detail, self.counter)
        for layer in range(self.layout.num_layers):
            for row in step.rows:
                self._write(layer, row)
            if step.signal:
                self._advance()
        sampled = [self._sample(row) if row.sample is not None else None for row in step.rows]
        await asyncio.sleep(0)
        return StepDone(
            step=step.step, sampled=sampled, begin_ns=begin, end_ns=time.monotonic_ns(), counter=self.counter
        )

    async def died(self) -> None:
        await asyncio.shield(self._dead)

    def kill(self) -> None:
        if not self._dead.done():
            self._dead.set_exception(ExecutorDied(-9))
            self._dead.exception()

    def close(self) -> None:
        del self._word
        self._counter_map.close()
        self.kv.close()
        os.close(self.kv_fd)
        os.close(self.counter_fd)

    def _place(self, layer: int, row: Row, position: int) -> int:
        """Byte offset of the K of the first head of a position."""
        page = array("i", row.pages)[position // self.layout.page_size]
        return (
            self.layout.offset(layer, page, self.num_pages)
            + position % self.layout.page_size * self.layout.head_dim * 4
        )

    def _write(self, layer: int, row: Row) -> None:
        for i, token in enumerate(row.tokens):
            struct.pack_into("<i", self.kv, self._place(layer, row, row.start + i), token + layer)

    def _read(self, layer: int, row: Row) -> list[int]:
        end = row.start + len(row.tokens)
        return [struct.unpack_from("<i", self.kv, self._place(layer, row, p))[0] - layer for p in range(end)]

    def _sample(self, row: Row) -> int:
        tokens = self._read(0, row)
        for layer in range(1, self.layout.num_layers):
            assert self._read(layer, row) == tokens, f"layer {layer} is not what layer 0 is"
        return toy_next(tokens)

    def _advance(self) -> None:
        self.counter += 1
        struct.pack_into("<Q", self._counter_map, 0, self.counter)
        self._libc.syscall(_SYS_FUTEX, ctypes.byref(self._word), _FUTEX_WAKE, 2**31 - 1, None, None, 0)
