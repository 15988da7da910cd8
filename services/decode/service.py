"""The decode service: admits attempts, brings their KV in, runs the batch, sends tokens back. The thin async shell around
`admission`, `scheduler` and the messenger."""

from __future__ import annotations

import asyncio
import logging
import time

from services.decode import admission
from services.decode.attempts import Attempt, Cancelled
from services.decode.metrics import DecodeMetrics
from services.decode.outbox import Outbox
from services.decode.scheduler import DecodeScheduler, PlannedRow
from services.decode.sequence import Outcome, Sequence
from shared import subjects
from shared.bus import Message
from shared.config import DecodeSettings
from shared.engine.pages import pack_pages
from shared.engine.protocol import Row, Step
from shared.errors import AttemptFailed, BusError, FabricError, NobodyListens, Refused, StepFailed
from shared.instance import Instance
from shared.messages import (
    Accepted,
    CancelGenerate,
    CancelPrefill,
    Drained,
    Emit,
    Generate,
    InstanceRef,
    Load,
    Prefill,
    RefusedReply,
    Reply,
    Timing,
    ToDecoder,
)
from shared.messenger.receiver import Incoming, KvReceiver
from shared.telemetry import traces
from shared.telemetry.metrics import Smoothed

log = logging.getLogger(__name__)

PREFILL_REPLY_S = 2.0
"""A prefiller answers a `Prefill` at once; silence this long counts as a failure of the attempt."""


class DecodeService:
    """One decoder. `run` serves until it is cancelled; `drain` ends it politely before."""

    def __init__(
        self, instance: Instance, settings: DecodeSettings, metrics: DecodeMetrics, tasks: asyncio.TaskGroup
    ) -> None:
        self._instance = instance
        self._settings = settings
        self._metrics = metrics
        self._tasks = tasks
        self._pool = instance.pool
        self._scheduler = DecodeScheduler(
            instance.pool,
            instance.layout.page_size,
            max_batch=settings.max_batch,
            max_positions=instance.identity.max_positions,
        )
        self.receiver = KvReceiver(
            instance.fabric,
            instance.layout,
            instance.pool,
            max_incoming=4 * settings.max_waiting,
            quarantine_s=settings.quarantine_s,
        )
        self._outbox = Outbox(instance.bus, instance.ref, self._emitted_for, self._on_router_gone)
        self._attempts: dict[str, Attempt] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._step_s = Smoothed()
        self._step = 0

    # ---- what others see

    @property
    def scheduler(self) -> DecodeScheduler:
        return self._scheduler

    def load(self) -> Load:
        return Load(
            free_pages=self._pool.free,
            total_pages=self._pool.num_pages,
            running=len(self._scheduler.running),
            waiting=self._waiting(),
            step_s=self._step_s.value,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` where ledger, slots and attempts do not match."""
        self._pool.check_integrity()
        self.receiver.check_integrity()

    async def run(self, listening: asyncio.Event) -> None:
        """Until cancelled; sets `listening` once it takes messages. Raises `EngineError` when the executor is no more."""
        self._instance.fabric.on_peer_lost(self._on_peer_lost)
        inbox = subjects.inbox("decode", self._instance.ref)
        await self._instance.bus.subscribe(inbox, ToDecoder, self._on_message)
        listening.set()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._run_steps())
            loops.create_task(self._run_reports())

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, waits for what is here, then fails the rest."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for attempt in list(self._attempts.values()):
                self._end_badly(attempt, AttemptFailed("decoder", "it is leaving"))
        await self._outbox.flush(self._now())

    def close(self) -> None:
        self.receiver.close()

    # ---- messages

    async def _on_message(self, message: Message[ToDecoder]) -> None:
        match message.body:
            case Generate():
                await message.reply(self._on_generate(message.body, message))
            case CancelGenerate(attempt=attempt):
                self._on_cancel(attempt)
            case Drained():
                self._on_drained(message.body)

    def _on_generate(self, generate: Generate, message: Message[ToDecoder]) -> Reply:
        refusal = admission.refuse(generate, self._capacity())
        if refusal is None:
            refusal = self._admit(generate, message)
        if refusal is not None:
            self._metrics.refused.labels(refusal.code).inc()
            return refusal
        return Accepted(generate.attempt)

    def _admit(self, generate: Generate, message: Message[ToDecoder]) -> RefusedReply | None:
        """Reserves the pages and arms the counter; only then the prefiller is asked, by the attempt's own task."""
        prompt = len(generate.tokens)
        self._pool.reserve(generate.attempt, admission.pages_at_admission(self._instance.layout, prompt))
        attempt = Attempt(Sequence.of(generate, self._now()), generate.prefiller, message.context, time.monotonic_ns())
        if generate.prefiller is not None and prompt > 1:
            try:
                attempt.incoming = self.receiver.expect(generate.attempt, generate.prefiller.instance, prompt)
            except Refused as refused:
                self._pool.release(generate.attempt)
                return RefusedReply(attempt=generate.attempt, code="busy", reason=refused.reason, retryable=True)
        self._attempts[generate.attempt] = attempt
        self._idle.clear()
        if attempt.incoming is None:
            self._start_running(attempt)
        else:
            self._tasks.create_task(self._bring_in(attempt, attempt.incoming))
        return None

    def _on_cancel(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            self._metrics.late.labels("cancel").inc()
            return
        self._end_badly(attempt, Cancelled())

    def _on_drained(self, drained: Drained) -> None:
        incoming = self.receiver.drained(drained.attempt)
        attempt = self._attempts.get(drained.attempt)
        if incoming is None:
            self._metrics.late.labels("drained").inc()
        elif attempt is not None:
            attempt.fail(AttemptFailed("prefill", drained.error or "cancelled", retryable=drained.retryable))

    def _on_peer_lost(self, incarnation: int, error: FabricError) -> None:
        lost = self.receiver.from_peer(incarnation)
        for incoming in lost:
            attempt = self._attempts.get(incoming.attempt)
            if attempt is not None:
                attempt.fail(AttemptFailed("transfer", f"the prefiller was lost: {error}"))
        self._tasks.create_task(self._fence(incarnation))

    async def _on_router_gone(self, router: InstanceRef) -> None:
        for attempt in [a for a in self._attempts.values() if a.router == router]:
            self._end_badly(attempt, Cancelled())

    # ---- an attempt until its KV is here

    async def _bring_in(self, attempt: Attempt, incoming: Incoming) -> None:
        """One attempt's task from admission until its KV is here, or until its pages are free again."""
        arrived = self._tasks.create_task(self.receiver.arrived(incoming))
        try:
            await self._ask_prefill(attempt, incoming)
            await attempt.wait_for_kv(arrived)
        except (AttemptFailed, Cancelled) as error:
            arrived.cancel()
            self._finish_badly(attempt, error)
            await self._outbox.flush(self._now())
            await self.receiver.reclaim(incoming, str(error) or "cancelled", self._ask_drained)
        else:
            self._note_arrival(attempt)
            self._start_running(attempt)
            if isinstance(error_meanwhile := attempt.end(), Cancelled):
                self._end_badly(attempt, error_meanwhile)

    async def _ask_prefill(self, attempt: Attempt, incoming: Incoming) -> None:
        """Raises `AttemptFailed`, or `Cancelled` when that came meanwhile."""
        sequence, prefiller = attempt.sequence, incoming.prefiller
        prompt_pages = self._instance.layout.pages_for(len(sequence.tokens) - 1)
        prefill = Prefill(
            attempt=sequence.attempt,
            prefiller=prefiller,
            decoder=self._instance.ref,
            fabric=self._instance.endpoint,
            layout=self._instance.layout,
            num_pages=self._pool.num_pages,
            region=self._instance.region.descriptor,
            pages=self._pool.pages(sequence.attempt)[:prompt_pages],
            immediate=incoming.slot.immediate,
            tail=self.receiver.tail_slot(incoming),
            tokens=sequence.tokens,
            budget_s=sequence.deadline - self._now(),
        )
        subject = subjects.inbox("prefill", prefiller)
        try:
            answer: Reply = await self._instance.bus.request(
                subject, prefill, Reply, timeout_s=PREFILL_REPLY_S, context=attempt.context
            )
        except NobodyListens:
            incoming.settled.set()
            raise AttemptFailed("prefill", f"{prefiller.name} is gone") from None
        except BusError as error:
            raise AttemptFailed("prefill", str(error)) from None
        if isinstance(answer, RefusedReply):
            incoming.settled.set()
            raise AttemptFailed("prefill", f"{prefiller.name} refused: {answer.reason}", retryable=answer.retryable)

    async def _ask_drained(self, incoming: Incoming, reason: str) -> None:
        cancel = CancelPrefill(
            attempt=incoming.attempt, prefiller=incoming.prefiller, decoder=self._instance.ref, reason=reason
        )
        subject = subjects.inbox("prefill", incoming.prefiller)
        await self._instance.bus.request(subject, cancel, Drained, timeout_s=self._settings.quarantine_s)

    async def _fence(self, incarnation: int) -> None:
        self._metrics.fenced.inc()
        await self.receiver.fence(incarnation)

    def _note_arrival(self, attempt: Attempt) -> None:
        attempt.ready_ns = time.monotonic_ns()
        size = self._kv_bytes(attempt)
        self._metrics.kv_wait.observe((attempt.ready_ns - attempt.admitted_ns) / 1e9)
        self._metrics.kv_bytes.inc(size)
        traces.record(
            "decode.wait_kv", attempt.context, attempt.admitted_ns, attempt.ready_ns, attributes={"kvmesh.bytes": size}
        )

    def _kv_bytes(self, attempt: Attempt) -> int:
        layout = self._instance.layout
        return layout.pages_for(attempt.sequence.prompt_tokens - 1) * layout.num_layers * layout.page_bytes

    # ---- the running batch

    def _start_running(self, attempt: Attempt) -> None:
        self._pool.mark(attempt.sequence.attempt, "running")
        attempt.ready_ns = attempt.ready_ns or time.monotonic_ns()
        attempt.sequence.computed = attempt.sequence.prompt_tokens - 1
        self._scheduler.add(attempt.sequence)
        self._wake.set()

    async def _run_steps(self) -> None:
        while True:
            self._expire()
            rows = self._scheduler.plan()
            if rows:
                await self._run_step(rows)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _run_step(self, rows: list[PlannedRow]) -> None:
        self._step += 1
        step = Step(step=self._step, rows=[self._row(row) for row in rows])
        try:
            done = await self._instance.executor.step(step, timeout_s=self._settings.step_timeout_s)
        except StepFailed as error:
            log.error("%s", error)
            for sequence in self._scheduler.fail(rows):
                self._finish_badly(self._attempts[sequence.attempt], AttemptFailed("decode step", error.detail))
        else:
            seconds = (done.end_ns - done.begin_ns) / 1e9
            self._step_s.add(seconds)
            self._metrics.step.observe(seconds)
            for outcome in self._scheduler.apply(rows, done.sampled):
                self._emit(outcome, done.begin_ns, done.end_ns)
        await self._outbox.flush(self._now())

    def _row(self, row: PlannedRow) -> Row:
        sequence = row.sequence
        return Row(
            tokens=sequence.tokens[row.start : row.end],
            start=row.start,
            pages=pack_pages(self._pool.pages(sequence.attempt)),
            sample=sequence.sampling if row.samples else None,
        )

    def _emit(self, outcome: Outcome, begin_ns: int, end_ns: int) -> None:
        sequence = outcome.sequence
        attempt = self._attempts[sequence.attempt]
        emit = Emit(
            attempt=sequence.attempt,
            index=sequence.emitted,
            tokens=outcome.tokens,
            finish=outcome.finish,
            timing=self._timing(attempt, begin_ns, end_ns) if not sequence.emitted else None,
        )
        sequence.emitted += len(outcome.tokens)
        self._metrics.tokens.inc(len(outcome.tokens))
        self._outbox.add(attempt.router, emit)
        if outcome.finish:
            self._metrics.attempts.labels(outcome.finish).inc()
            self._forget(attempt)

    def _timing(self, attempt: Attempt, begin_ns: int, end_ns: int) -> Timing:
        traces.record("decode.first_step", attempt.context, begin_ns, end_ns)
        return Timing(
            admitted_to_ready_s=(attempt.ready_ns - attempt.admitted_ns) / 1e9,
            first_step_s=(end_ns - begin_ns) / 1e9,
            transferred_bytes=self._kv_bytes(attempt) if attempt.incoming is not None else 0,
        )

    # ---- ends

    def _end_badly(self, attempt: Attempt, error: AttemptFailed | Cancelled) -> None:
        """From any state. What waits for KV ends in its own task; what is ready or runs leaves the batch here."""
        if attempt.ready_ns:
            self._scheduler.remove(attempt.sequence)
            self._finish_badly(attempt, error)
        else:
            attempt.fail(error)

    def _finish_badly(self, attempt: Attempt, error: AttemptFailed | Cancelled) -> None:
        """The router is told, unless it was the router's wish; the attempt is no more. Its pages are not freed here."""
        sequence = attempt.sequence
        if isinstance(error, AttemptFailed):
            emit = Emit(attempt=sequence.attempt, index=sequence.emitted, error=str(error), retryable=error.retryable)
            self._outbox.add(attempt.router, emit)
        self._metrics.attempts.labels("failed" if isinstance(error, AttemptFailed) else "cancelled").inc()
        self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.sequence.attempt, None)
        if not self._attempts:
            self._idle.set()

    def _expire(self) -> None:
        now = self._now()
        for sequence in [*self._scheduler.running, *self._scheduler.ready]:
            if sequence.deadline < now:
                error = AttemptFailed("decode", "the request's deadline passed", retryable=False)
                self._end_badly(self._attempts[sequence.attempt], error)

    async def _run_reports(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._expire()
            await self._outbox.flush(self._now())
            await self._outbox.report(self._now())

    # ---- small things

    def _capacity(self) -> admission.Capacity:
        return admission.Capacity(
            me=self._instance.ref,
            model=self._instance.identity,
            layout=self._instance.layout,
            total_pages=self._pool.num_pages,
            free_pages=self._pool.free,
            waiting=self._waiting(),
            max_waiting=self._settings.max_waiting,
            draining=self._draining,
            starved=self._scheduler.starved,
            attempts=self._attempts,  # type: ignore[arg-type]
        )

    def _waiting(self) -> int:
        return len(self._attempts) - len(self._scheduler.running)

    def _emitted_for(self, router: InstanceRef) -> dict[str, int]:
        return {a.sequence.attempt: a.sequence.emitted for a in self._attempts.values() if a.router == router}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
