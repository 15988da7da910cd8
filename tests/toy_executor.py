"""An executor without a model: its "K and V" are the token ids themselves, written into the real pages of a real memfd, and
its next token is a function of all that it reads back. A page that was lost, doubled, reordered or overwritten shows in the
output; a layer, a head, or a K or V that was not transferred, or to the wrong place, raises."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import struct
import time
from array import array
from collections.abc import Iterator, Sequence

from shared.engine.counter import create_counter
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.errors import ExecutorDied
from shared.kv.shards import heads_of, shard_layout
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


def toy_verify(tokens: list[int], drafts: list[int]) -> list[int]:
    """What the toy model draws after `tokens` and after each of the drafts that stand."""
    drawn = [toy_next(tokens)]
    for draft in drafts:
        if draft != drawn[-1]:
            break
        drawn.append(toy_next(tokens + drawn))
    return drawn


def _has(step: Step, token: int | None) -> bool:
    return any(token is None or token in row.tokens for row in step.rows)


class ToyExecutor:
    """`gate` must be set for a step to go on with layer `hold_at`, and closes itself when step `close_at` (from 1) begins;
    `fail_next` makes one fail there; `kill()` ends it as a dead process would."""

    hold_at = 0
    close_at: int | None = None

    def __init__(self, whole: KvLayout, num_pages: int, tp: int = 1, dp: int = 1) -> None:
        """`whole` is the whole model's layout; all `dp` times `tp` ranks are here, each with a region of its own."""
        assert whole.dtype == "float32"
        self.whole = whole
        self.num_pages = num_pages
        self.tp = tp
        self.dp = dp
        self.ep = 1
        self.layout = shard_layout(whole, tp)
        self.kv_bytes = self.layout.region_bytes(num_pages)
        self.kv_fds = [os.memfd_create(f"toy-kv-{rank}") for rank in range(dp * tp)]
        for fd in self.kv_fds:
            os.ftruncate(fd, self.kv_bytes)
        self.counter_fd = create_counter()
        self.kv = [mmap.mmap(fd, self.kv_bytes) for fd in self.kv_fds]
        self._counter_map = mmap.mmap(self.counter_fd, 4096)
        self._word = ctypes.c_char.from_buffer(self._counter_map)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.counter = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.steps: list[Sequence[Step]] = []
        """Of each step that was asked for, those of the data parallel ranks."""
        self._failing: dict[int, tuple[str, int | None]] = {}
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def step(self, steps: Sequence[Step], *, timeout_s: float) -> list[StepDone | StepError]:
        assert len(steps) == self.dp
        self.steps.append(steps)
        self.entered.set()
        begin = time.monotonic_ns()
        if len(self.steps) == self.close_at:
            self.gate.clear()
        works, failing = dict(enumerate(steps)), dict[int, str]()
        for layer in range(self.layout.all_layers):
            if layer == self.hold_at:
                await self._pass_gate()
                failing = self._take_failing(steps)
                works = {rank: step for rank, step in works.items() if rank not in failing}
            for rank, step in works.items():
                for row in step.rows:
                    self._write(rank, layer, row)
            if any(step.signal for step in works.values()):
                self._advance()
        await asyncio.sleep(0)
        return [
            self._done(rank, step, begin)
            if rank in works
            else StepError(step=step.step, detail=failing[rank], counter=self.counter)
            for rank, step in enumerate(steps)
        ]

    async def _pass_gate(self) -> None:
        gate = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait({gate, self._dead}, return_when=asyncio.FIRST_COMPLETED)
        gate.cancel()
        if self._dead.done():
            self._dead.result()

    def _take_failing(self, steps: Sequence[Step]) -> dict[int, str]:
        """Rank → why it fails in this step."""
        ranks = [rank for rank, (_, token) in self._failing.items() if _has(steps[rank], token)]
        return {rank: self._failing.pop(rank)[0] for rank in ranks}

    def fail_next(self, detail: str, rank: int = 0, token: int | None = None) -> None:
        """The next step in which that data parallel rank has rows fails there; with `token`, the next that computes it."""
        self._failing[rank] = detail, token

    async def died(self) -> None:
        await asyncio.shield(self._dead)

    def kill(self) -> None:
        if not self._dead.done():
            self._dead.set_exception(ExecutorDied(-9))
            self._dead.exception()

    def close(self) -> None:
        del self._word
        self._counter_map.close()
        for kv, fd in zip(self.kv, self.kv_fds, strict=True):
            kv.close()
            os.close(fd)
        os.close(self.counter_fd)

    def _done(self, rank: int, step: Step, begin_ns: int) -> StepDone:
        sampled = [self._sample(rank, row) if row.sample is not None else [] for row in step.rows]
        end_ns = time.monotonic_ns()
        return StepDone(step=step.step, sampled=sampled, begin_ns=begin_ns, end_ns=end_ns, counter=self.counter)

    def _places(self, dp_rank: int, layer: int, row: Row, position: int) -> Iterator[tuple[mmap.mmap, int, int]]:
        """Of every head of K and of V of every rank of the data parallel rank: the region, the offset, and what is added to a
        token there."""
        number = self.layout.group_of(layer)
        group, whole = self.layout.groups[number], self.whole.groups[number]
        page = array("i", row.pages)[position // group.page_size]
        begin = self.layout.offset(layer, page, self.num_pages)
        begin += position % group.page_size * group.head_dim * 4
        for rank, kv in enumerate(self.kv[dp_rank * self.tp : (dp_rank + 1) * self.tp]):
            heads = heads_of(whole.num_kv_heads, self.tp, rank)
            for part in range(group.parts):
                for i, head in enumerate(heads):
                    at = begin + (part * len(heads) + i) * group.head_bytes
                    yield kv, at, layer + 1000 * (2 * head + part)

    def _write(self, rank: int, layer: int, row: Row) -> None:
        for i, token in enumerate(row.tokens):
            for kv, at, mark in self._places(rank, layer, row, row.start + i):
                struct.pack_into("<i", kv, at, token + mark)

    def _read(self, rank: int, layer: int, row: Row) -> list[int]:
        """Before the row's drafts."""
        end = row.start + len(row.tokens) - row.drafts
        return [self._read_one(rank, layer, row, position) for position in range(end)]

    def _read_one(self, rank: int, layer: int, row: Row, position: int) -> int:
        places = self._places(rank, layer, row, position)
        found = {struct.unpack_from("<i", kv, at)[0] - mark for kv, at, mark in places}
        assert len(found) == 1, f"heads, or K and V, of position {position} are of different tokens"
        return found.pop()

    def _sample(self, rank: int, row: Row) -> list[int]:
        tokens = self._read(rank, 0, row)
        for layer in range(1, self.layout.all_layers):
            assert self._read(rank, layer, row) == tokens, f"layer {layer} is not what layer 0 is"
        return toy_verify(tokens, row.tokens[len(row.tokens) - row.drafts :])

    def _advance(self) -> None:
        self.counter += 1
        struct.pack_into("<Q", self._counter_map, 0, self.counter)
        self._libc.syscall(_SYS_FUTEX, ctypes.byref(self._word), _FUTEX_WAKE, 2**31 - 1, None, None, 0)
