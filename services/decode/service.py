"""The decode service: admits or refuses, and ends what is cancelled. `arrivals` brings the KV in, `batch` runs it, `outbox`
sends the tokens back."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from services.decode import admission
from services.decode.arrivals import Arrivals
from services.decode.attempts import Attempt, Attempts, Cancelled
from services.decode.batch import Batch
from services.decode.grammars import Grammars, lacking
from services.decode.metrics import DecodeMetrics
from services.decode.outbox import Outbox
from services.decode.rank import DecodeRank, ranks_of
from services.decode.sequence import Sequence
from shared import subjects
from shared.bus import Message
from shared.config import DecodeSettings
from shared.errors import AttemptFailed, Refused
from shared.instance import Instance
from shared.messages import (
    Accepted,
    CancelGenerate,
    Drained,
    Generate,
    InstanceRef,
    Load,
    RefusedReply,
    Reply,
    ToDecoder,
)
from shared.messenger.receiver import KvReceiver
from shared.telemetry import traces

LAST_WORDS_S = 1.0
"""How long a decoder that leaves waits for the attempts that it has failed to say so."""

REPORT_S = 1.0
"""Seconds between two statuses to a router."""


class DecodeService:
    """One decoder. `run` serves until it is cancelled; `drain` ends it politely before."""

    def __init__(
        self, instance: Instance, settings: DecodeSettings, metrics: DecodeMetrics, tasks: asyncio.TaskGroup
    ) -> None:
        self._instance = instance
        self._max_waiting = settings.max_waiting * instance.dp
        self._metrics = metrics
        self.ranks = ranks_of(instance, settings)
        self._receiver = KvReceiver(
            instance.fabric,
            instance.layout,
            instance.tp,
            max_incoming=4 * self._max_waiting,
            quarantine_s=settings.quarantine_s,
            most_pages=instance.most_digested_pages,
            hidden_bytes=instance.hidden_bytes,
        )
        self._outbox = Outbox(instance.bus, instance.ref, self._emitted_for, self._on_router_gone)
        self._attempts = Attempts(metrics, self._outbox)
        self._batch = Batch(
            instance, self.ranks, self._attempts, self._outbox, metrics, step_timeout_s=settings.step_timeout_s
        )
        self._grammars = Grammars(instance, tasks)
        self._arrivals = Arrivals(
            instance,
            self._receiver,
            self._attempts,
            self._outbox,
            metrics,
            self._grammars,
            tasks,
            ready=self._on_ready,
            freed=self._batch.wake,
        )
        self._admitted = 0
        self._draining = False

    @property
    def idle(self) -> asyncio.Event:
        """Set while no attempt is here. Pages of attempts that failed may still be in quarantine."""
        return self._attempts.idle

    def load(self) -> Load:
        free = [rank.pool.free for rank in self.ranks]
        return Load(
            free_pages=sum(free),
            largest_free_pages=max(free),
            total_pages=sum(rank.pool.num_pages for rank in self.ranks),
            running=self._running(),
            waiting=self._waiting(),
            step_s=self._batch.step_s.value,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a ledger or the slots do not match."""
        for rank in self.ranks:
            rank.pool.check_integrity()
        self._receiver.check_integrity()

    async def run(self, listening: asyncio.Event) -> None:
        """Until cancelled; sets `listening` once it takes messages. Raises `EngineError` when the executor is no more."""
        self._instance.fabric.on_peer_lost(self._arrivals.on_peer_lost)
        inbox = subjects.inbox("decode", self._instance.ref)
        await self._instance.bus.subscribe(inbox, ToDecoder, self._on_message)
        listening.set()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._batch.run())
            loops.create_task(self._run_reports())

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, waits for what is here, then fails the rest."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.idle.wait()
        except TimeoutError:
            for attempt in self._attempts:
                self._end_badly(attempt, AttemptFailed("decoder", "it is leaving"))
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self.idle.wait()
        await self._outbox.flush(self._now())

    def close(self) -> None:
        self._receiver.close()
        self._grammars.close()

    async def _on_message(self, message: Message[ToDecoder]) -> None:
        match message.body:
            case Generate():
                await message.reply(self._on_generate(message.body, message))
            case CancelGenerate(attempt=attempt_id):
                self._on_cancel(attempt_id)
            case Drained():
                self._arrivals.on_drained(message.body)
                if message.wants_reply:
                    await message.reply(Accepted(message.body.attempt))

    def _on_generate(self, generate: Generate, message: Message[ToDecoder]) -> Reply:
        decided = admission.decide(generate, self._capacity())
        reply = decided if isinstance(decided, RefusedReply) else self._admit(generate, message, self.ranks[decided])
        if isinstance(reply, RefusedReply):
            self._metrics.refused.labels(reply.code).inc()
        return reply

    def _admit(self, generate: Generate, message: Message[ToDecoder], rank: DecodeRank) -> Reply:
        """Reserves the pages and arms the counter; only then the prefiller is asked, by the attempt's own task."""
        prompt, began_ns = len(generate.tokens), time.monotonic_ns()
        rank.pool.reserve(generate.attempt, admission.pages_at_admission(self._instance.layout, prompt))
        sequence = Sequence.of(generate, self._now())
        attempt = Attempt(sequence, rank, generate.prefiller, message.context, time.monotonic_ns())
        if generate.prefiller is not None and not generate.alone:
            try:
                attempt.incoming = self._receiver.expect(generate.attempt, generate.prefiller, prompt, rank)
            except Refused as refused:
                rank.pool.release(generate.attempt)
                return RefusedReply(attempt=generate.attempt, code="busy", reason=refused.reason, retryable=True)
        self._admitted += 1
        rank.picked = self._admitted
        traces.record("decode.admission", message.context, began_ns, time.monotonic_ns())
        self._attempts.add(attempt)
        self._outbox.greet(generate.router, self._now())
        self._grammars.begin(attempt, generate.grammar)
        if attempt.incoming is not None:
            self._arrivals.start(attempt, attempt.incoming)
        elif attempt.compiling is not None:
            self._arrivals.start_without(attempt)
        else:
            self._batch.start(attempt)
        return Accepted(generate.attempt)

    def _on_ready(self, attempt: Attempt) -> None:
        self._batch.start(attempt)
        meanwhile = attempt.end()
        if isinstance(meanwhile, Cancelled):
            self._end_badly(attempt, meanwhile)
        elif (unmatched := lacking(attempt)) is not None:
            self._end_badly(attempt, unmatched)

    def _on_cancel(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            self._metrics.late.labels("cancel").inc()
        else:
            self._end_badly(attempt, Cancelled())

    async def _on_router_gone(self, router: InstanceRef) -> None:
        for attempt in self._attempts.of_router(router):
            self._end_badly(attempt, Cancelled())

    def _end_badly(self, attempt: Attempt, error: AttemptFailed | Cancelled) -> None:
        """From any state. What waits for its KV ends in its own task; what is ready or runs leaves the batch here."""
        if attempt.ready_ns:
            self._batch.remove(attempt)
            self._attempts.finish_badly(attempt, error)
        else:
            attempt.fail(error)

    async def _run_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._batch.expire()
            await self._outbox.flush(self._now())
            await self._outbox.report(self._now())

    def _capacity(self) -> admission.Capacity:
        return admission.Capacity(
            me=self._instance.ref,
            model=self._instance.identity,
            layout=self._instance.layout,
            tp=self._instance.tp,
            drafter=self._instance.drafter,
            pool_pages=self.ranks[0].pool.num_pages,
            ranks=[
                admission.Room(rank.pool.free, rank.scheduler.starved, self._attempts.on_rank(rank), rank.picked)
                for rank in self.ranks
            ],
            waiting=self._waiting(),
            max_waiting=self._max_waiting,
            draining=self._draining,
            attempts=self._attempts,
        )

    def _running(self) -> int:
        return sum(len(rank.scheduler.running) for rank in self.ranks)

    def _waiting(self) -> int:
        return len(self._attempts) - self._running()

    def _emitted_for(self, router: InstanceRef) -> dict[str, int]:
        return {attempt.id: attempt.sequence.emitted for attempt in self._attempts.of_router(router)}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
