"""The running batches: step after step while there is something to run, all data parallel ranks together. The async shell of
`scheduler`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from services.decode.attempts import Attempt, Attempts
from services.decode.grammars import STAGE, fill_masks
from services.decode.metrics import DecodeMetrics
from services.decode.outbox import Outbox
from services.decode.rank import DecodeRank
from services.decode.scheduler import PlannedRow
from services.decode.sequence import Outcome
from services.decode.sequence import Sequence as DecodeSequence
from shared.engine.ints import pack_ints
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.errors import AttemptFailed
from shared.instance import Instance
from shared.kv import plan
from shared.messages import Emit, Timing, TokenLogprob
from shared.telemetry import traces
from shared.telemetry.metrics import Smoothed

log = logging.getLogger(__name__)


class Batch:
    """Runs what is given to `start`, on the rank that it has, until it ends, is taken out by `remove`, or its deadline passes.
    A rank with nothing to run takes part in the others' steps."""

    def __init__(
        self,
        instance: Instance,
        ranks: Sequence[DecodeRank],
        attempts: Attempts,
        outbox: Outbox,
        metrics: DecodeMetrics,
        *,
        step_timeout_s: float,
    ) -> None:
        self._instance = instance
        self._ranks = ranks
        self._attempts = attempts
        self._outbox = outbox
        self._metrics = metrics
        self._step_timeout_s = step_timeout_s
        self._wake = asyncio.Event()
        self._number = 0
        self.step_s = Smoothed()
        """Seconds of a step."""

    def start(self, attempt: Attempt) -> None:
        """Its KV is here: all of the prompt but the last token, which its first step runs. Where none was to come, its first
        steps compute it."""
        attempt.rank.pool.mark(attempt.id, "running")
        attempt.ready_ns = attempt.ready_ns or time.monotonic_ns()
        attempt.sequence.computed = 0 if attempt.incoming is None else attempt.sequence.prompt_tokens - 1
        attempt.rank.scheduler.add(attempt.sequence)
        self._wake.set()

    def remove(self, attempt: Attempt) -> None:
        """Takes it out; its pages are free at once, or after the step that uses them. Idempotent."""
        attempt.rank.scheduler.remove(attempt.sequence)
        self.wake()

    def wake(self) -> None:
        """Something may run that could not: pages are free again."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. Raises `EngineError` when the executor is no more."""
        while True:
            self.expire()
            plans = [self._plan(rank) for rank in self._ranks]
            if any(plans):
                await self._step(plans)
            else:
                self._wake.clear()
                await self._wake.wait()

    def expire(self) -> None:
        """Ends what has passed its deadline."""
        now = asyncio.get_running_loop().time()
        for attempt in self._attempts:
            if attempt.ready_ns and attempt.sequence.deadline < now:
                self.remove(attempt)
                error = AttemptFailed("decode", "the request's deadline passed", retryable=False)
                self._attempts.finish_badly(attempt, error)

    def _plan(self, rank: DecodeRank) -> list[PlannedRow]:
        before = rank.scheduler.preempted
        rows = rank.scheduler.plan()
        self._metrics.preemptions.inc(rank.scheduler.preempted - before)
        return rows

    async def _step(self, plans: Sequence[list[PlannedRow]]) -> None:
        """One step of all ranks; `plans` are theirs."""
        self._number += 1
        for sequence, error in await fill_masks(plans):
            self._end_badly(sequence, AttemptFailed(STAGE, str(error), retryable=False))
        steps = [
            Step(step=self._number, rows=[self._row(rank, row) for row in rows])
            for rank, rows in zip(self._ranks, plans, strict=True)
        ]
        answers = await self._instance.executor.step(steps, timeout_s=self._step_timeout_s)
        self._measure(answers)
        for rank, rows, answer in zip(self._ranks, plans, answers, strict=True):
            if isinstance(answer, StepError):
                self._fail(rank, rows, answer)
            else:
                self._take(rank, rows, answer)
        await self._outbox.flush(asyncio.get_running_loop().time())

    def _row(self, rank: DecodeRank, row: PlannedRow) -> Row:
        sequence = row.sequence
        pages = pack_ints(rank.pool.pages(sequence.attempt))
        return sequence.row(row.start, row.end, pages, row.drafts, samples=row.samples, mask=row.mask)

    def _measure(self, answers: Sequence[StepDone | StepError]) -> None:
        """A step takes as long as its slowest rank."""
        seconds = [(done.end_ns - done.begin_ns) / 1e9 for done in answers if isinstance(done, StepDone)]
        if seconds:
            self.step_s.add(max(seconds))
            self._metrics.step.observe(max(seconds))

    def _take(self, rank: DecodeRank, rows: list[PlannedRow], done: StepDone) -> None:
        for number, scores in done.scores.items():
            if not rows[number].sequence.cancelled:
                self._emit_scores(rows[number], scores)
        for outcome in rank.scheduler.apply(rows, done.sampled, done.proposed):
            if outcome.error is None:
                self._emit(outcome, done)
            else:
                self._end_badly(outcome.sequence, AttemptFailed(STAGE, str(outcome.error), retryable=False))

    def _fail(self, rank: DecodeRank, rows: list[PlannedRow], error: StepError) -> None:
        """That rank's rows alone."""
        log.error("step %d failed on data parallel rank %d: %s", error.step, rank.number, error.detail)
        for sequence in rank.scheduler.fail(rows):
            if (attempt := self._attempts.get(sequence.attempt)) is not None:
                self._attempts.finish_badly(attempt, AttemptFailed("decode step", error.detail))

    def _end_badly(self, sequence: DecodeSequence, error: AttemptFailed) -> None:
        if (attempt := self._attempts.get(sequence.attempt)) is not None:
            self.remove(attempt)
            self._attempts.finish_badly(attempt, error)

    def _emit_scores(self, row: PlannedRow, scores: list[TokenLogprob]) -> None:
        sequence = row.sequence
        emit = Emit(attempt=sequence.attempt, index=0, scores=scores, scored=sequence.scored)
        sequence.scored += len(scores)
        self._outbox.add(sequence.router, emit)

    def _emit(self, outcome: Outcome, done: StepDone) -> None:
        sequence = outcome.sequence
        attempt = self._attempts.get(sequence.attempt)
        assert attempt is not None, "a sequence runs without its attempt"
        asks = sequence.sampling.logprobs is not None
        emit = Emit(
            attempt=attempt.id,
            index=sequence.emitted,
            tokens=outcome.tokens,
            finish=outcome.finish,
            timing=None if sequence.emitted else self._timing(attempt, done),
            logprobs=done.logprobs.get(outcome.row, [])[: len(outcome.tokens)] if asks else [],
        )
        sequence.emitted += len(outcome.tokens)
        self._metrics.note_tokens(outcome)
        self._outbox.add(attempt.router, emit)
        if outcome.finish:
            self._attempts.finish(attempt, outcome.finish)

    def _timing(self, attempt: Attempt, done: StepDone) -> Timing:
        attempt.first_ns = done.end_ns
        traces.record("decode.first_step", attempt.context, done.begin_ns, done.end_ns)
        moved = plan.kv_bytes(self._instance.layout, attempt.sequence.prompt_tokens, self._instance.tp)
        return Timing(
            admitted_to_ready_s=(attempt.ready_ns - attempt.admitted_ns) / 1e9,
            first_step_s=(done.end_ns - done.begin_ns) / 1e9,
            transferred_bytes=moved if attempt.incoming is not None else 0,
        )
