"""The prefill service: queues prompts, computes them chunk by chunk, and has each layer's pages written while the next layer
is computed. The thin async shell around `scheduler` and the messenger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from services.prefill.job import Job
from services.prefill.metrics import PrefillMetrics
from services.prefill.running import Cancelled, Running
from services.prefill.scheduler import ChunkPart, PrefillScheduler
from services.prefill.spans import record_chunk, record_sent
from shared import subjects
from shared.bus import Message
from shared.config import PrefillSettings
from shared.engine.ints import pack_ints
from shared.engine.protocol import Row, Step, StepDone, StepError
from shared.errors import AttemptFailed, BusError, EngineError, FabricError, KvmeshError, MeshError
from shared.instance import Instance
from shared.kv.shards import layouts_fit
from shared.lifecycle import spawn
from shared.messages import Accepted, CancelPrefill, Drained, Load, Prefill, RefusedReply, Reply, ToPrefiller
from shared.messenger import sender
from shared.messenger.sender import KvSender
from shared.telemetry.metrics import Smoothed

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""How long a decoder's fabric may take to answer the first time."""


GONE_S = 5.0
"""A decoder that does not answer for this long, over a broker that is there, is gone: it needs to know nothing."""

TOLD_S = 1.0
TELL_AGAIN_S = 0.2


class PrefillService:
    """One prefiller. `run` serves until it is cancelled; `drain` ends it politely before."""

    def __init__(
        self, instance: Instance, settings: PrefillSettings, metrics: PrefillMetrics, tasks: asyncio.TaskGroup
    ) -> None:
        self._instance = instance
        self._settings = settings
        self._metrics = metrics
        self._tasks = tasks
        (self._pool,) = instance.pools
        self._scheduler = PrefillScheduler(self._pool, instance.layout.page_size, chunk_tokens=settings.chunk_tokens)
        self.sender = KvSender(
            instance.fabric,
            instance.regions,
            instance.executor.counter_fd,
            instance.layout,
            self._pool.num_pages,
            max_outgoing=2 * settings.max_queue,
            timeout_s=settings.transfer_timeout_s,
            most_pages=instance.most_digested_pages,
            hidden_bytes=instance.hidden_bytes,
            page_digests=instance.page_digests(0),
        )
        self._running: dict[str, Running] = {}
        self._counter = 0
        self._step = 0
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self._draining = False
        self._rate = Smoothed()

    # ---- what others see

    def load(self) -> Load:
        return Load(
            free_pages=self._pool.free,
            largest_free_pages=self._pool.free,
            total_pages=self._pool.num_pages,
            running=len(self._running) - self._scheduler.queued,
            waiting=self._scheduler.queued,
            queued_prefill_tokens=self._scheduler.queued_tokens,
            prefill_tokens_per_s=self._rate.value,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` where ledger and jobs do not match."""
        self._pool.check_integrity()
        assert set(self._pool.owners()) <= set(self._running), "pages are held for no job"

    async def run(self, listening: asyncio.Event) -> None:
        """Until cancelled; sets `listening` once it takes messages. Raises `EngineError` when the executor is no more."""
        self._instance.fabric.on_peer_lost(self._on_peer_lost)
        inbox = subjects.inbox("prefill", self._instance.ref)
        await self._instance.bus.subscribe(inbox, ToPrefiller, self._on_message)
        listening.set()
        while True:
            parts = self._scheduler.plan()
            if parts:
                await self._run_chunk(parts)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, waits for what is here, then fails the rest."""
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.idle.wait()
        except TimeoutError:
            for running in self._running.values():
                running.fail(MeshError("the prefiller is leaving"))
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await self.idle.wait()

    def close(self) -> None:
        self.sender.close()

    # ---- messages

    async def _on_message(self, message: Message[ToPrefiller]) -> None:
        match message.body:
            case Prefill():
                await message.reply(self._on_prefill(message.body, message))
            case CancelPrefill():
                spawn(self._tasks, self._on_cancel(message.body, message))

    def _on_prefill(self, prefill: Prefill, message: Message[ToPrefiller]) -> Reply:
        job = Job(prefill)
        refusal = self._refuse(job)
        if refusal is not None:
            self._metrics.refused.labels(refusal.code).inc()
            return refusal
        running = Running(job, message.context)
        self._running[job.attempt] = running
        self.idle.clear()
        running.task = self._tasks.create_task(self._run_job(running))
        return Accepted(job.attempt)

    def _refuse(self, job: Job) -> RefusedReply | None:
        """Why not, or None: take it."""
        prefill, layout = job.prefill, self._instance.layout
        pages = layout.pages_for(job.total)

        def no(code: str, reason: str, *, retryable: bool = True) -> RefusedReply:
            return RefusedReply(attempt=prefill.attempt, code=code, reason=reason, retryable=retryable)  # type: ignore[arg-type]

        if prefill.prefiller != self._instance.ref:
            return no("stale_incarnation", f"this is incarnation {self._instance.ref.incarnation:016x}")
        if prefill.attempt in self._running:
            return no("duplicate", "an attempt with this id is already here", retryable=False)
        if prefill.layout != layout:
            return no("mismatch", f"layout differs: prefiller has {layout}, decoder has {prefill.layout}")
        if not layouts_fit(layout, self._instance.tp, prefill.tp):
            ranks = f"prefiller has {self._instance.tp}, decoder has {prefill.tp}"
            return no("mismatch", f"tp does not fit: {ranks}, {layout.num_kv_heads} KV heads")
        if prefill.drafter != self._instance.drafter:
            ours, theirs = (name or "no drafter" for name in (self._instance.drafter, prefill.drafter))
            return no("mismatch", f"speculate differs: prefiller has {ours}, decoder has {theirs}")
        if prefill.digests != (self._instance.settings.verify == "pages"):
            return no("mismatch", f"verify differs: prefiller has {self._instance.settings.verify}")
        if not job.total or len(prefill.pages) != pages or len(prefill.tokens) > self._instance.identity.max_positions:
            reason = f"{len(prefill.tokens)} tokens and {len(prefill.pages)} pages do not fit together"
            return no("invalid", reason, retryable=False)
        if any(not 0 <= token < self._instance.identity.vocab_size for token in prefill.tokens):
            return no("invalid", "a token id is outside the vocabulary", retryable=False)
        if any(not 0 <= page < prefill.num_pages for page in prefill.pages):
            return no("invalid", "a page is outside the decoder's region", retryable=False)
        if len(set(prefill.pages)) != pages:
            return no("invalid", "a page is named twice", retryable=False)
        if pages > self._pool.num_pages:
            return no(
                "invalid", f"the prompt needs {pages} pages; the pool has {self._pool.num_pages}", retryable=False
            )
        if self._draining:
            return no("draining", "this prefiller is leaving")
        if len(self._running) >= self._settings.max_queue:
            return no("busy", f"{len(self._running)} prompts are here already")
        return None

    async def _on_cancel(self, cancel: CancelPrefill, message: Message[ToPrefiller]) -> None:
        """Answers once no write of the attempt can land, whatever state it is in, or if it is not here at all."""
        running = self._running.get(cancel.attempt)
        if running is None or running.job.prefill.decoder != cancel.decoder:
            self._metrics.late.inc()
        else:
            running.fail(Cancelled(cancel.reason))
            await running.drained.wait()
        answer = Drained(attempt=cancel.attempt, decoder=cancel.decoder, prefiller=self._instance.ref)
        try:
            await message.reply(answer)
        except BusError as error:
            log.debug("no answer to a cancel: %s", error)

    def _on_peer_lost(self, incarnation: int, error: FabricError) -> None:
        for running in self._running.values():
            if running.job.prefill.decoder.incarnation == incarnation:
                running.fail(error)

    # ---- a job from acceptance to its end

    async def _run_job(self, running: Running) -> None:
        """One job's task. Whatever happens, its pages are freed and the decoder knows."""
        job = running.job
        outcome: str = "sent"
        try:
            async with asyncio.timeout(job.prefill.budget_s):
                await self._send(running)
        except Cancelled:
            outcome = "cancelled"
        except TimeoutError:
            outcome = "failed"
            running.fail(AttemptFailed("prefill", "the request's deadline passed", retryable=False))
        except KvmeshError as error:
            outcome = "failed"
            running.fail(error)
        except Exception as error:  # the outermost frame of a job's task: one prompt must not end the others
            outcome = "failed"
            log.exception("attempt %s failed", job.attempt)
            running.fail(AttemptFailed("prefill", f"internal error: {type(error).__name__}"))
        finally:
            await asyncio.shield(self._clean_up(running, outcome))

    async def _send(self, running: Running) -> None:
        """Connect, wait for the chunks, write the tail, wait until all has arrived. Raises why it ended otherwise."""
        await running.unless_failed(self._open(running))
        self._scheduler.add(running.job)
        self._wake.set()
        await running.unless_failed(running.computed.wait())
        self._pool.mark(running.job.attempt, "in_transit")
        assert running.outgoing is not None
        pages = self._pool.pages(running.job.attempt)
        report = await running.unless_failed(self.sender.finish(running.outgoing, pages, running.hidden))
        running.sent = True
        record_sent(running, report, self._metrics)

    async def _open(self, running: Running) -> None:
        running.outgoing = await self.sender.open(running.job.prefill, timeout_s=CONNECT_S)

    async def _clean_up(self, running: Running, outcome: str) -> None:
        """Writes first, then the word to the decoder, then the pages, which a forward may still be using."""
        self._scheduler.remove(running.job)
        if running.outgoing is not None and not running.sent:
            await self.sender.drain(running.outgoing)
        running.drained.set()
        if outcome == "failed":
            telling = self._tasks.create_task(self._tell_failed(running))
            if self._draining:
                await telling
        await running.out_of_step.wait()
        self._pool.release(running.job.attempt)
        del self._running[running.job.attempt]
        self._metrics.attempts.labels(outcome).inc()
        self._wake.set()
        if not self._running:
            self.idle.set()

    async def _tell_failed(self, running: Running) -> None:
        prefill, reason = running.job.prefill, running.reason()
        drained = Drained(
            attempt=prefill.attempt,
            decoder=prefill.decoder,
            prefiller=self._instance.ref,
            error=str(reason),
            retryable=reason.retryable if isinstance(reason, AttemptFailed) else True,
        )
        subject = subjects.inbox("decode", prefill.decoder)
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(prefill.budget_s):
                while not await self._told(subject, drained, running):
                    heard_at = heard_at if self._instance.bus.connected else loop.time()
                    if self._draining or loop.time() > heard_at + GONE_S:
                        break
                    await asyncio.sleep(TELL_AGAIN_S)

    async def _told(self, subject: str, drained: Drained, running: Running) -> bool:
        """False where it may be worth another try: a broker that is away, or was, may have lost it."""
        try:
            await self._instance.bus.request(subject, drained, Accepted, timeout_s=TOLD_S, context=running.context)
        except BusError as error:
            log.debug("the decoder was not told: %s", error)
            return False
        return True

    # ---- chunks

    async def _run_chunk(self, parts: list[ChunkPart]) -> None:
        """One forward. The watcher is armed first, so that the first layer's writes cannot be late."""
        runs = [self._running[part.job.attempt] for part in parts]
        for run in runs:
            run.enter_step(time.monotonic_ns(), self._metrics)
        for outgoing, error in self.sender.arm(self._counter, self._sender_parts(parts, runs)):
            self._running[outgoing.prefill.attempt].fail(error)
        self._step += 1
        step = Step(step=self._step, rows=[self._row(part) for part in parts], signal=True)
        try:
            (answer,) = await self._instance.executor.step([step], timeout_s=self._settings.step_timeout_s)
            if isinstance(answer, StepError):
                self._on_step_failed(runs, answer)
            else:
                self._on_step_done(parts, runs, answer)
        finally:
            for run in runs:
                run.out_of_step.set()

    def _sender_parts(self, parts: Sequence[ChunkPart], runs: Sequence[Running]) -> list[sender.ChunkPart]:
        """What of the chunk is to be written: nothing of a job that has already failed."""
        page_size = self._instance.layout.page_size
        return [
            sender.ChunkPart(run.outgoing, self._pool.pages(part.job.attempt), part.completes(page_size))
            for part, run in zip(parts, runs, strict=True)
            if run.outgoing is not None and not run.has_failed
        ]

    def _row(self, part: ChunkPart) -> Row:
        return Row(
            tokens=part.job.prefill.tokens[part.start : part.end],
            start=part.start,
            pages=pack_ints(self._pool.pages(part.job.attempt)),
            following=part.job.prefill.tokens[part.end] if self._instance.hidden_bytes and not part.last else None,
        )

    def _on_step_done(self, parts: list[ChunkPart], runs: list[Running], done: StepDone) -> None:
        self._counter = done.counter
        tokens = sum(part.end - part.start for part in parts)
        seconds = (done.end_ns - done.begin_ns) / 1e9
        self._rate.add(tokens / max(seconds, 1e-9))
        self._metrics.tokens.inc(tokens)
        self._metrics.chunk.observe(seconds)
        for row, (part, run) in enumerate(zip(parts, runs, strict=True)):
            run.hidden = done.hidden.get(row, b"")
            run.forwards.append((done.begin_ns, done.end_ns))
            record_chunk(run, part, done)
        for job in self._scheduler.apply(parts):
            self._running[job.attempt].computed.set()

    def _on_step_failed(self, runs: list[Running], error: StepError) -> None:
        log.error("step %d failed: %s", error.step, error.detail)
        self.sender.disarm()
        self._counter = error.counter
        for run in runs:
            self._scheduler.remove(run.job)
            run.fail(EngineError(f"the prefill step failed: {error.detail}"))
