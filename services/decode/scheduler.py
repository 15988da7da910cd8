"""Continuous batching: which sequences run in the next step, with which pages. Pure and synchronous.

Sequences come with their KV in place (`computed` tokens of it) and run until they end. A row runs the tokens whose KV is
missing: one for a sequence that decodes; up to `recompute_tokens` for one that was preempted, which is how it comes back
without its client noticing. When a page is needed and none is free, the youngest running sequence is preempted: its pages
are freed and it goes to the head of the queue.

Drafts (`services.decode.speculation`) take what is left over: pages that nobody needs in the step, for which nobody is preempted,
and which are free again after it, where the tokens that came of it do not reach them. The KV of a draft that fell stays in its
place until the token that came instead is computed there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from services.decode.sequence import NO_DRAFTS, Drafts, Outcome, Sequence
from services.decode.speculation import Speculation
from shared.errors import GrammarError
from shared.grammar import Matcher
from shared.kv.ledger import PagePool

NOTHING: Mapping[int, list[int]] = {}


@dataclass(slots=True)
class PlannedRow:
    """Positions [start, end) of `sequence` run in this step, and `drafts` after them; tokens are sampled where `samples`."""

    sequence: Sequence
    start: int
    end: int
    drafts: Drafts = NO_DRAFTS
    mask: bytes = b""
    """Under a grammar: see `shared.engine.protocol.Row`."""

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens) and self.sequence.max_tokens > 0


class DecodeScheduler:
    """The queue of sequences that are ready, and the running batch, oldest first."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        max_batch: int,
        max_positions: int,
        recompute_tokens: int = 256,
        speculation: Speculation | None = None,
    ):
        self._pool = pool
        self._page_size = page_size
        self._max_batch = max_batch
        self._max_positions = max_positions
        self._recompute_tokens = recompute_tokens
        self._speculation = speculation
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
        if self._speculation is not None:
            self._add_drafts(rows, self._speculation)
        self._in_step = {row.sequence.attempt for row in rows}
        return rows

    def apply(
        self, rows: list[PlannedRow], sampled: list[list[int]], proposed: Mapping[int, list[int]] = NOTHING
    ) -> list[Outcome]:
        """What the step made of each row that is still wanted, in order: `sampled` and `proposed` as in `StepDone`. Sequences
        that ended have left, their pages free."""
        self._in_step = set()
        outcomes = []
        for i, (row, tokens) in enumerate(zip(rows, sampled, strict=True)):
            if row.sequence.cancelled:
                self._drop(row.sequence)
                continue
            accepted = max(0, len(tokens) - 1)
            row.sequence.computed = row.end + accepted
            drafted = len(row.drafts.tokens)
            row.sequence.drafted += drafted
            row.sequence.accepted += accepted
            if drafted and row.sequence.length is not None:
                row.sequence.length.note(drafted, accepted)
            self._note_proposals(row, proposed.get(i, []))
            if tokens:
                outcome = Outcome(row.sequence, row=i, drafted=drafted, accepted=accepted)
                self._take_tokens(outcome, tokens)
                outcomes.append(outcome)
            elif row.end == len(row.sequence.tokens):
                outcomes.append(Outcome(row.sequence, finish="length", row=i))
                self._drop(row.sequence)
        return outcomes

    def fail(self, rows: list[PlannedRow]) -> list[Sequence]:
        """The step raised: its sequences leave, their pages free. Those that were still wanted."""
        self._in_step = set()
        for row in rows:
            self._drop(row.sequence)
        return [row.sequence for row in rows if not row.sequence.cancelled]

    def _take_tokens(self, outcome: Outcome, tokens: list[int]) -> None:
        sequence = outcome.sequence
        for token in tokens:
            if token in sequence.stop_token_ids:
                outcome.finish = "stop"
                break
            sequence.tokens.append(token)
            outcome.tokens.append(token)
            generated = len(sequence.tokens) - sequence.prompt_tokens
            if generated >= sequence.max_tokens or len(sequence.tokens) >= self._max_positions:
                outcome.finish = "length"
            if sequence.matcher is not None:
                _match(sequence.matcher, token, outcome)
            if outcome.finish or outcome.error:
                break
        if outcome.finish or outcome.error:
            self._drop(sequence)
        else:
            self._trim(sequence)

    def _add_drafts(self, rows: list[PlannedRow], speculation: Speculation) -> None:
        """To rows of one token that draw, in turn an equal share of what the step has room for."""
        room = speculation.step_tokens - sum(row.end - row.start for row in rows)
        drawing = [row for row in rows if row.samples and row.end - row.start == 1]
        for i, row in enumerate(drawing):
            if room < 1:
                return
            share = -(-room // (len(drawing) - i))
            row.drafts = self._fitting(row, speculation.drafts(row.sequence, share))
            room -= len(row.drafts.tokens)

    def _fitting(self, row: PlannedRow, drafts: Drafts) -> Drafts:
        """Of `drafts` those for which there are positions and pages: first for what is verified, then for what is asked for. A
        drafter needs the places of all that it is asked for, in case that all drafts stand."""
        positions = max(0, self._max_positions - row.end - 1)
        tokens = drafts.tokens[:positions]
        propose = min(drafts.propose, positions - len(tokens))
        held = self._hold_drafts(row, len(tokens) + propose)
        return Drafts(tokens[:held], max(0, min(propose, held - len(tokens))))

    def _note_proposals(self, row: PlannedRow, proposed: list[int]) -> None:
        sequence = row.sequence
        sequence.hidden, sequence.proposed = b"", proposed
        chains = self._speculation is not None and self._speculation.chains
        sequence.chained = row.drafts.propose if chains else 0

    def _trim(self, sequence: Sequence) -> None:
        """To what its tokens and what is proposed after them need."""
        self._pool.trim(sequence.attempt, self._pages_for(len(sequence.tokens) + len(sequence.proposed)))

    def _spare(self) -> None:
        """Every sequence gives back what it holds for proposals alone."""
        for sequence in self._running:
            if sequence.proposed:
                sequence.proposed = []
                self._trim(sequence)

    def _hold_drafts(self, row: PlannedRow, count: int) -> int:
        """Of so many drafts those for which there are pages, held or free."""
        name = row.sequence.attempt
        held = len(self._pool.pages(name))
        more = min(self._pages_for(row.end + count) - held, self._pool.free)
        if more > 0:
            self._pool.reserve(name, more, "running")
            held += more
        return min(count, held * self._page_size - row.end)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

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
            missing = self._pages_for(tokens) - held
            if missing > self._pool.free:
                self._spare()
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
        sequence.forget_kv()
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
