"""Chunked prefill: which tokens of which prompts are computed in the next forward. Pure and synchronous.

First come, first served: a chunk takes from the oldest prompt, and fills what is left of its budget from the next ones. A
prompt holds source pages for all its tokens from its first chunk on; where they are not free it waits, and nobody overtakes
it, so that a long prompt is never starved by short ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.prefill.job import Job
from shared.kv import plan
from shared.kv.ledger import PagePool


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Tokens [start, end) of `job`."""

    job: Job
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.job.total

    def completes(self, page_size: int) -> range:
        """Page positions that this part fills, or ends on."""
        return plan.pages_of_chunk(self.start, self.end, self.job.total, page_size)


class PrefillScheduler:
    """The queue of jobs that still have tokens to compute. Pages stay held after the last chunk: see `release`."""

    def __init__(self, pool: PagePool, page_size: int, *, chunk_tokens: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._chunk_tokens = chunk_tokens
        self._queue: list[Job] = []

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Tokens still to be computed."""
        return sum(job.left for job in self._queue)

    def pages_for(self, job: Job) -> int:
        return -(-job.total // self._page_size)

    def add(self, job: Job) -> None:
        self._queue.append(job)

    def remove(self, job: Job) -> None:
        """Computes no more of it. Idempotent. Its pages stay held."""
        if job in self._queue:
            self._queue.remove(job)

    def plan(self) -> list[ChunkPart]:
        """The next chunk: at most `chunk_tokens` tokens; empty where nothing can run now."""
        parts: list[ChunkPart] = []
        budget = self._chunk_tokens
        for job in self._queue:
            if not budget or not self._hold_pages(job):
                break
            end = job.done + min(job.left, budget)
            parts.append(ChunkPart(job, job.done, end))
            budget -= end - job.done
        return parts

    def apply(self, parts: list[ChunkPart]) -> list[Job]:
        """The chunk was computed. Jobs that are complete leave the queue and are returned."""
        complete = []
        for part in parts:
            part.job.done = part.end
            if part.last and part.job in self._queue:
                self._queue.remove(part.job)
                complete.append(part.job)
        return complete

    def _hold_pages(self, job: Job) -> bool:
        if self._pool.pages(job.attempt):
            return True
        return self._pool.reserve(job.attempt, self.pages_for(job), "running") is not None
