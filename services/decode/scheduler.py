"""Continuous batching: which sequences run in the next step, with which pages. Pure and synchronous.

Sequences come with their KV in place (`computed` tokens of it) and run until they end. A row runs the tokens whose KV is
missing: one for a sequence that decodes; up to `recompute_tokens` for one that was preempted, which is how it comes back
without its client noticing. When a page is needed and none is free, the youngest running sequence is preempted: its pages
are freed and it goes to the head of the queue.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.decode.sequence import Outcome, Sequence
from shared.errors import GrammarError
from shared.grammar import Matcher
from shared.kv.ledger import PagePool


@dataclass(slots=True)
class PlannedRow:
    """Positions [start, end) of `sequence` run in this step; a token is sampled where `samples`."""

    sequence: Sequence
    start: int
    end: int
    mask: bytes = b""
    """Under a grammar: see `shared.engine.protocol.Row`."""

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)


class DecodeScheduler:
    """The queue of sequences that are ready, and the running batch, oldest first."""

    def __init__(
        self, pool: PagePool, page_size: int, *, max_batch: int, max_positions: int, recompute_tokens: int = 256
    ):
        self._pool = pool
        self._page_size = page_size
        self._max_batch = max_batch
        self._max_positions = max_positions
        self._recompute_tokens = recompute_tokens
        self._ready: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._in_step: set[str] = set()
        self._added = 0
        self.preempted = 0
        """Preemptions so far."""

    @property
    def ready(self) -> list[Sequence]:
        return list(self._ready)

    @property
    def running(self) -> list[Sequence]:
        return list(self._running)

    @property
    def starved(self) -> bool:
        """A preempted sequence waits for pages: nothing new should be admitted before it."""
        return any(sequence.preemptions for sequence in self._ready)

    def add(self, sequence: Sequence) -> None:
        """Its pages hold `computed` tokens of KV and are `running`."""
        self._added += 1
        sequence.order = self._added
        self._ready.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, wherever it is, and frees its pages: at once, or after the step that is using them. Idempotent."""
        sequence.cancelled = True
        if sequence in self._ready:
            self._ready.remove(sequence)
        if sequence.attempt not in self._in_step:
            self._drop(sequence)

    def plan(self) -> list[PlannedRow]:
        """The rows of the next step, oldest sequence first; empty where there is nothing to run. `apply` must follow."""
        self._fill()
        rows: list[PlannedRow] = []
        recompute = self._recompute_tokens
        for sequence in list(self._running):
            if sequence not in self._running:
                continue  # preempted for an older one in this very plan
            missing = len(sequence.tokens) - sequence.computed
            take = missing if missing == 1 else min(missing, recompute)
            if take and self._hold_pages(sequence, sequence.computed + take):
                recompute -= take if missing > 1 else 0
                rows.append(PlannedRow(sequence, sequence.computed, sequence.computed + take))
        rows = [row for row in rows if row.sequence in self._running]
        self._in_step = {row.sequence.attempt for row in rows}
        return rows

    def apply(self, rows: list[PlannedRow], sampled: list[int | None]) -> list[Outcome]:
        """What the step made of each row that is still wanted, in order. Sequences that ended have left, their pages free."""
        self._in_step = set()
        outcomes = []
        for i, (row, token) in enumerate(zip(rows, sampled, strict=True)):
            if row.sequence.cancelled:
                self._drop(row.sequence)
                continue
            row.sequence.computed = row.end
            if token is not None:
                outcomes.append(self._take_token(row.sequence, token, i))
        return outcomes

    def fail(self, rows: list[PlannedRow]) -> list[Sequence]:
        """The step raised: its sequences leave, their pages free. Those that were still wanted."""
        self._in_step = set()
        for row in rows:
            self._drop(row.sequence)
        return [row.sequence for row in rows if not row.sequence.cancelled]

    def _take_token(self, sequence: Sequence, token: int, row: int) -> Outcome:
        outcome = Outcome(sequence, row=row)
        if token in sequence.stop_token_ids:
            outcome.finish = "stop"
        else:
            sequence.tokens.append(token)
            outcome.tokens = [token]
            generated = len(sequence.tokens) - sequence.prompt_tokens
            if generated >= sequence.max_tokens or len(sequence.tokens) >= self._max_positions:
                outcome.finish = "length"
            if sequence.matcher is not None:
                _match(sequence.matcher, token, outcome)
        if outcome.finish or outcome.error:
            self._drop(sequence)
        return outcome

    def _fill(self) -> None:
        """Moves sequences from the queue into the batch, in order; a preempted one when all its tokens fit again. Those
        behind it wait with it while something runs; when nothing does, the pages it waits for are theirs, and they go first.
        """
        while self._ready and len(self._running) < self._max_batch:
            sequence = self._ready[0]
            if sequence.preemptions and not self._hold_pages(sequence, len(sequence.tokens) + 1, preempt=False):
                if not self._running:
                    self._overtake()
                return
            self._running.append(self._ready.popleft())

    def _overtake(self) -> None:
        holding = [sequence for sequence in self._ready if not sequence.preemptions][: self._max_batch]
        for sequence in holding:
            self._ready.remove(sequence)
            self._running.append(sequence)

    def _hold_pages(self, sequence: Sequence, tokens: int, *, preempt: bool = True) -> bool:
        """Pages for `tokens` tokens, taken from the youngest where none is free. False: it was itself the youngest."""
        while True:
            held = len(self._pool.pages(sequence.attempt))
            missing = -(-tokens // self._page_size) - held
            if missing <= 0 or self._pool.reserve(sequence.attempt, missing, "running") is not None:
                return True
            if not preempt:
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.release(sequence.attempt)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preempted += 1
        older = sum(other.preemptions > 0 and other.order < sequence.order for other in self._ready)
        self._ready.insert(older, sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        self._pool.release(sequence.attempt)


def _match(matcher: Matcher, token: int, outcome: Outcome) -> None:
    """A complete output ends well even where it has reached its longest; a token that is not allowed is not part of it."""
    try:
        matcher.accept(token)
    except GrammarError as error:
        outcome.tokens, outcome.finish, outcome.error = outcome.tokens[:-1], None, error
    else:
        outcome.finish = "stop" if matcher.finished else outcome.finish
