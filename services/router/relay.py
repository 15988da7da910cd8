"""One request through the mesh: a place, an attempt, another attempt where that may help, and clean-up in any case.

Cancellation may come at every await (the client leaves): `_close` is synchronous, so nothing can come between an attempt's
end and its cancel.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from opentelemetry.trace import Span, get_current_span

from services.router.attempts import PREFILL_STAGES, Attempt, AttemptTable
from services.router.budget import RetryBudget
from services.router.courier import Courier
from services.router.dispatch import Need, NoPair, NoRoom, Pair, choose, release, reserve
from services.router.line import Line
from services.router.metrics import RouterMetrics
from services.router.recent import Finished, Recent
from services.router.registry import Registry
from services.router.validate import Job
from shared.bus import Bus
from shared.config import RouterSettings
from shared.errors import AttemptFailed, BusError, NobodyListens, Refused, RequestError
from shared.messages import Generate, InstanceRef, RefusedReply, Reply, TokenLogprob
from shared.subjects import inbox
from shared.telemetry import traces

log = logging.getLogger(__name__)

ACCEPT_S = 2.0
"""A decoder admits or refuses at once; from one that does not answer within this the attempt is taken back."""

RECENTLY_S = 10.0
"""A working pair that was there within this time may come back: see the setting `absence_s`."""

PARK_S = 3.0
"""How long a request waits for a broker that is away, before it is refused."""


class Consumer(Protocol):
    """Where the tokens of a request's attempts go: `reset` comes before every attempt's tokens."""

    @property
    def begun(self) -> bool:
        """Bytes have been sent: there is no other attempt from here on."""
        ...

    @property
    def stopped(self) -> bool:
        """No more tokens are wanted."""
        ...

    def reset(self) -> None: ...

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> bool:
        """Takes tokens in the turn in which they came. True: the request's task is wanted, for `advance`, or because no
        more tokens are."""
        ...

    def on_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """Takes those of the prompt's next tokens, all of which come before the first token."""
        ...

    async def advance(self, attempt: Attempt) -> None:
        """In the request's task, after `on_tokens` asked for it or the attempt ended: sends what waits."""
        ...


class Request:
    """A job on its way through the router, and the listener of its attempts.

    `deadline` is loop time, which uvloop keeps in milliseconds; what is measured (`began`, `first_at`) is `time.monotonic`.
    """

    __slots__ = (
        "_metrics",
        "avoid",
        "began",
        "consumer",
        "deadline",
        "first_at",
        "job",
        "last_at",
        "queue_s",
        "wanted",
    )

    def __init__(self, job: Job, consumer: Consumer, metrics: RouterMetrics, *, began: float, timeout_s: float) -> None:
        self.job, self.consumer = job, consumer
        self.began = began
        self.deadline = asyncio.get_running_loop().time() + timeout_s - (time.monotonic() - began)
        self.avoid: dict[InstanceRef, int] = {}
        self.wanted = asyncio.Event()
        self.first_at: float | None = None
        self.last_at = began
        self.queue_s = 0.0
        self._metrics = metrics

    def reset(self) -> None:
        self.wanted.clear()
        self.first_at = None
        self.consumer.reset()

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        else:
            self._metrics.itl.observe((now - self.last_at) / len(tokens))
        self.last_at = now
        if self.consumer.on_tokens(tokens, logprobs):
            self.wanted.set()

    def on_prompt(self, logprobs: list[TokenLogprob]) -> None:
        self.consumer.on_prompt(logprobs)

    def on_end(self) -> None:
        self.wanted.set()


class Relay:
    """Runs requests. One a router; everything it needs is given to it."""

    def __init__(
        self, me: InstanceRef, settings: RouterSettings, bus: Bus, registry: Registry, metrics: RouterMetrics
    ) -> None:
        self._me, self._settings, self._bus, self._registry, self._metrics = me, settings, bus, registry, metrics
        self.table = AttemptTable()
        self.courier = Courier(bus)
        self.recent = Recent()
        self.line: Line[Request, Attempt] = Line(
            self._offer, self._undo, max_length=settings.max_queue, patience_s=self._patience_s
        )
        self.budget = RetryBudget(settings.retry_ratio, settings.retry_floor)
        self._back = asyncio.Event()
        bus.on_reconnect(self._back.set)
        self._loop = asyncio.get_running_loop()
        self._turn = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def _patience_s(self) -> float:
        """A pair that was there a moment ago is waited for: an instance that died may be started again."""
        return self._settings.absence_s if self._registry.paired_within(RECENTLY_S, self._loop.time()) else 0.0

    @property
    def running(self) -> int:
        """Requests in here, those in the line included."""
        return self._running

    async def idle(self, timeout_s: float) -> None:
        """Until no request runs, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d requests still run", self._running)

    async def run(self, request: Request) -> Attempt:
        """Until the answer is complete in the consumer; gives the attempt that made it.

        Raises `Refused`, `RequestError`, `AttemptFailed`, or `TimeoutError` at the request's deadline. Whatever happens,
        also cancellation, no attempt is left behind.
        """
        self._running += 1
        self._idle.clear()
        attempt = None
        try:
            async with asyncio.timeout_at(request.deadline):
                attempt = await self._run(request)
            return attempt
        finally:
            self.recent.add(_finished(request, attempt))
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _run(self, request: Request) -> Attempt:
        tries, again, waits_since = 0, False, self._loop.time()
        self.budget.on_request(waits_since)
        while True:
            attempt = await self._place(request, waits_since + self._settings.queue_timeout_s, again=again)
            again = True
            attempt.number = tries + 1
            try:
                if await self._try(attempt, request):
                    self._note_success(attempt, request)
                    return attempt
            except AttemptFailed as failure:
                tries += 1
                waits_since = self._loop.time()
                self._note_failure(attempt, request, failure)
                if request.consumer.begun or not failure.retryable or tries >= self._settings.max_attempts:
                    raise
                if not self._may_retry():
                    raise
                log.info("attempt %s failed, another follows: %s", attempt.id, failure)
            finally:
                self._close(attempt)

    def _may_retry(self) -> bool:
        allowed = self.budget.take(self._loop.time())
        self._metrics.retries.labels("made" if allowed else "refused").inc()
        return allowed

    async def _place(self, request: Request, patience: float, *, again: bool) -> Attempt:
        """A place on a pair; waits for the broker, and in the line until `patience` (loop time)."""
        request.reset()
        begin = time.monotonic()
        with _span("router.queue"):
            await self._await_broker()
            try:
                attempt = await self.line.wait(request, min(request.deadline, patience), again=again)
            finally:
                request.queue_s += time.monotonic() - begin
        self._metrics.queue.observe(time.monotonic() - begin)
        return attempt

    async def _await_broker(self) -> None:
        while not self._bus.connected:
            self._back.clear()
            try:
                async with asyncio.timeout(PARK_S):
                    await self._back.wait()
            except TimeoutError:
                raise Refused("the broker is away") from None

    async def _try(self, attempt: Attempt, request: Request) -> bool:
        """One attempt to its end. False: the decoder did not take it, and another place may be sought."""
        attributes = {"kvmesh.attempt": attempt.id, "kvmesh.path": attempt.pair.path}
        with _span("router.attempt", attributes):
            if not await self._send(attempt, request):
                return False
            await self._follow(attempt, request)
            return True

    async def _send(self, attempt: Attempt, request: Request) -> bool:
        """Until the decoder has answered. False: not taken, and it is known there."""
        decoder = attempt.pair.decoder
        if attempt.failure is not None:
            attempt.settled = True
            return False
        try:
            generate = self._generate(attempt, request)
            reply: Reply = await self._bus.request(inbox("decode", decoder.ref), generate, Reply, timeout_s=ACCEPT_S)
        except NobodyListens:
            attempt.settled = True
            request.avoid[decoder.ref] = decoder.beats
            return False
        except BusError as error:
            if attempt.accepted or attempt.failure is not None:
                return True
            if not self._bus.connected:
                return False
            raise AttemptFailed("admission", str(error)) from None
        if isinstance(reply, RefusedReply):
            return self._on_refusal(attempt, request, reply)
        attempt.accept(self._loop.time())
        if len(self.line):
            self.line.kick()
        return True

    def _generate(self, attempt: Attempt, request: Request) -> Generate:
        job, pair = request.job, attempt.pair
        return Generate(
            attempt=attempt.id,
            router=self._me,
            decoder=pair.decoder.ref,
            prefiller=None if pair.prefiller is None else pair.prefiller.announce,
            tokens=job.tokens,
            sampling=job.sampling,
            max_tokens=job.max_tokens,
            stop_token_ids=job.stop_token_ids,
            prompt_logprobs=job.prompt_logprobs,
            budget_s=request.deadline - self._loop.time(),
            grammar=job.grammar,
        )

    def _on_refusal(self, attempt: Attempt, request: Request, refusal: RefusedReply) -> bool:
        """False where another place may be sought without counting this as an attempt; raises otherwise."""
        attempt.settled = True
        decoder = attempt.pair.decoder
        self._metrics.refusals.labels(refusal.code).inc()
        match refusal.code:
            case "busy":
                decoder.refused()
            case "draining":
                self._registry.draining(decoder.ref)
            case "stale_incarnation":
                self._registry.stale(decoder.ref)
                self.table.on_lost(decoder.ref, "was restarted")
            case "invalid":
                raise RequestError(refusal.reason)
            case _:
                raise AttemptFailed("admission", refusal.reason, retryable=refusal.retryable)
        return False

    async def _follow(self, attempt: Attempt, request: Request) -> None:
        """Until every token is in the consumer, or it wants no more."""
        consumer = request.consumer
        while True:
            await request.wanted.wait()
            request.wanted.clear()
            failure = attempt.failure
            complete = attempt.finish is not None or consumer.stopped
            if failure is None or consumer.begun:
                await consumer.advance(attempt)
            if complete or consumer.stopped:
                return
            if failure is not None:
                raise failure

    def _offer(self, request: Request) -> Attempt | NoRoom | NoPair:
        """For the line: a place is an attempt that is counted on its pair."""
        now = self._loop.time()
        prompt_tokens = len(request.job.tokens)
        scored = request.job.prompt_logprobs is not None
        need = Need(prompt_tokens, request.avoid, alone=request.job.alone)
        choice = choose(self._registry.decoders, self._registry.prefillers, need, now)
        if isinstance(choice, NoPair):
            return NoPair(self._registry.missing() or choice.reason)
        if not isinstance(choice, Pair):
            return choice
        self._turn += 1
        attempt = Attempt(choice, request, now, scores=prompt_tokens - 1 if scored else 0)
        reserve(choice, attempt.id, prompt_tokens, self._turn)
        self.table.add(attempt)
        return attempt

    def _undo(self, attempt: Attempt) -> None:
        attempt.settled = True
        self._close(attempt)

    def _close(self, attempt: Attempt) -> None:
        """The attempt is over here; the decoder is told, unless it knows. Synchronous and idempotent."""
        self.table.remove(attempt)
        release(attempt.pair, attempt.id)
        if not attempt.settled:
            attempt.settled = True
            self._metrics.cancels.inc()
            self.courier.cancel(attempt.id, attempt.pair.decoder.ref, "the router needs it no more")
        self.line.kick()

    def _note_success(self, attempt: Attempt, request: Request) -> None:
        metrics = self._metrics
        metrics.attempts.labels("ok").inc()
        metrics.paths.labels(attempt.pair.path).inc()
        metrics.prompt_tokens.inc(len(request.job.tokens))
        metrics.output_tokens.inc(attempt.received)
        if request.first_at is not None:
            metrics.ttft.observe(request.first_at - request.began)
        if attempt.timing is not None:
            metrics.kv_wait.observe(attempt.timing.admitted_to_ready_s)
            metrics.transferred.inc(attempt.timing.transferred_bytes)

    def _note_failure(self, attempt: Attempt, request: Request, failure: AttemptFailed) -> None:
        """The side that is to blame is avoided until it is heard of again."""
        self._metrics.attempts.labels(failure.stage).inc()
        pair = attempt.pair
        blamed = pair.prefiller if failure.stage in PREFILL_STAGES and pair.prefiller is not None else pair.decoder
        request.avoid[blamed.ref] = blamed.beats
        if failure.retryable:
            blamed.half_open = True


def _finished(request: Request, attempt: Attempt | None) -> Finished:
    """`attempt`: the one that made the answer."""
    now, first = time.monotonic(), request.first_at
    pair, timing = (None, None) if attempt is None else (attempt.pair, attempt.timing)
    return Finished(
        ended_unix_s=time.time(),
        outcome="failed" if attempt is None else "ok",
        prefiller=None if pair is None or pair.prefiller is None else pair.prefiller.ref.name,
        decoder=None if pair is None else pair.decoder.ref.name,
        tries=None if attempt is None else attempt.number,
        prompt_tokens=len(request.job.tokens),
        output_tokens=None if attempt is None else attempt.received,
        total_s=now - request.began,
        queue_s=request.queue_s,
        kv_wait_s=None if timing is None else timing.admitted_to_ready_s,
        first_step_s=None if timing is None else timing.first_step_s,
        ttft_s=None if first is None else first - request.began,
        stream_s=None if first is None else request.last_at - first,
    )


def _span(name: str, attributes: dict[str, str] | None = None) -> AbstractContextManager[Span]:
    """A part of the request's span, where that is recorded."""
    current = get_current_span()
    return traces.span(name, attributes=attributes) if current.is_recording() else nullcontext(current)
