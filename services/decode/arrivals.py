"""How an attempt's KV comes in: ask the prefiller, wait, and either hand over to the running batch or take the pages back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.decode.attempts import Attempt, Attempts, Cancelled
from services.decode.grammars import Grammars
from services.decode.metrics import DecodeMetrics
from services.decode.outbox import Outbox
from shared import subjects
from shared.errors import AttemptFailed, BusError, FabricError, NobodyListens
from shared.instance import Instance
from shared.kv import plan
from shared.lifecycle import spawn
from shared.messages import CancelPrefill, Drained, Prefill, RefusedReply, Reply
from shared.messenger.receiver import Incoming, KvReceiver
from shared.telemetry import traces

PREFILL_REPLY_S = 2.0
"""A prefiller answers a `Prefill` at once; silence this long counts as a failure of the attempt."""

COME_BACK_S = 3.0
"""After our own connection to the broker came back, a prefiller that does not listen gets this long to come back to it."""

ASK_AGAIN_S = 0.1


class Arrivals:
    """`ready` is called with each attempt whose KV is here, `freed` when pages of one that failed are free again."""

    def __init__(
        self,
        instance: Instance,
        receiver: KvReceiver,
        attempts: Attempts,
        outbox: Outbox,
        metrics: DecodeMetrics,
        grammars: Grammars,
        tasks: asyncio.TaskGroup,
        *,
        ready: Callable[[Attempt], None],
        freed: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._receiver = receiver
        self._attempts = attempts
        self._outbox = outbox
        self._metrics = metrics
        self._grammars = grammars
        self._tasks = tasks
        self._ready = ready
        self._freed = freed
        self._broker_back_at: float | None = None
        instance.bus.on_reconnect(self._note_broker_back)

    def start(self, attempt: Attempt, incoming: Incoming) -> None:
        """The attempt's pages are reserved and its counter is armed: now the prefiller may be asked."""
        self._tasks.create_task(self._bring_in(attempt, incoming))

    def start_without(self, attempt: Attempt) -> None:
        """The same where there is no KV to come: only its grammar is waited for."""
        self._tasks.create_task(self._when_settled(attempt))

    def on_drained(self, drained: Drained) -> None:
        """The prefiller gave up by itself, and no write of the attempt can land any more."""
        incoming = self._receiver.drained(drained.attempt, drained.prefiller)
        attempt = self._attempts.get(drained.attempt)
        if incoming is None:
            self._metrics.late.labels("drained").inc()
        elif attempt is not None:
            attempt.fail(AttemptFailed("prefill", drained.error or "cancelled", retryable=drained.retryable))

    def on_peer_lost(self, incarnation: int, error: FabricError) -> None:
        for incoming in self._receiver.from_peer(incarnation):
            attempt = self._attempts.get(incoming.attempt)
            if attempt is not None:
                attempt.fail(AttemptFailed("transfer", f"the prefiller was lost: {error}"))
        self._metrics.fenced.inc()
        spawn(self._tasks, self._receiver.fence(incarnation))

    async def _bring_in(self, attempt: Attempt, incoming: Incoming) -> None:
        """One attempt's task from admission until its KV is here, or until its pages are free again."""
        asked = asyncio.create_task(self._ask_prefill(attempt, incoming))
        arrived = asyncio.create_task(self._arrived(attempt, incoming))
        try:
            await attempt.unless_failed(asked)
            await attempt.unless_failed(arrived)
        except (AttemptFailed, Cancelled) as error:
            await _ended(asked)
            if not await _came(arrived):
                return await self._give_up(attempt, incoming, error)
        finally:
            asked.cancel()
            arrived.cancel()
        self._note(attempt)
        return await self._when_settled(attempt)

    async def _when_settled(self, attempt: Attempt) -> None:
        await self._grammars.settled(attempt)
        self._ready(attempt)

    async def _arrived(self, attempt: Attempt, incoming: Incoming) -> None:
        attempt.sequence.hidden = await self._receiver.arrived(incoming)

    async def _give_up(self, attempt: Attempt, incoming: Incoming, error: AttemptFailed | Cancelled) -> None:
        self._attempts.finish_badly(attempt, error)
        await self._outbox.flush(asyncio.get_running_loop().time())
        await self._receiver.reclaim(incoming, str(error) or "cancelled", self._ask_drained)
        self._freed()

    def _note_broker_back(self) -> None:
        self._broker_back_at = asyncio.get_running_loop().time()

    def _may_be_late(self) -> bool:
        """The broker was away from us until now, so perhaps from the prefiller too, which is only later to come back."""
        return self._broker_back_at is not None and (
            asyncio.get_running_loop().time() - self._broker_back_at < COME_BACK_S
        )

    async def _ask_prefill(self, attempt: Attempt, incoming: Incoming) -> None:
        """Raises `AttemptFailed` where the prefiller does not take it, and why the attempt ended where it did meanwhile."""
        prefiller = incoming.prefiller
        while True:
            try:
                return await self._ask_prefill_once(attempt, incoming)
            except NobodyListens:
                ended = attempt.end()
                if ended is None and self._may_be_late():
                    await asyncio.wait({attempt.failure}, timeout=ASK_AGAIN_S)
                    continue
                incoming.settled.set()
                raise ended or AttemptFailed("prefill", f"{prefiller.name} is gone") from None

    async def _ask_prefill_once(self, attempt: Attempt, incoming: Incoming) -> None:
        """Raises `NobodyListens`, or `AttemptFailed` as `_ask_prefill`."""
        prefiller = incoming.prefiller
        subject = subjects.inbox("prefill", prefiller)
        try:
            answer: Reply = await self._instance.bus.request(
                subject, self._prefill(attempt, incoming), Reply, timeout_s=PREFILL_REPLY_S, context=attempt.context
            )
        except NobodyListens:
            raise
        except BusError as error:
            raise AttemptFailed("prefill", str(error)) from None
        if isinstance(answer, RefusedReply):
            incoming.settled.set()
            raise AttemptFailed("prefill", f"{prefiller.name} refused: {answer.reason}", retryable=answer.retryable)

    def _prefill(self, attempt: Attempt, incoming: Incoming) -> Prefill:
        sequence, layout, rank = attempt.sequence, self._instance.layout, attempt.rank
        return Prefill(
            attempt=attempt.id,
            prefiller=incoming.prefiller,
            decoder=self._instance.ref,
            fabric=self._instance.endpoint,
            layout=layout,
            num_pages=rank.pool.num_pages,
            regions=[grant.descriptor for grant in incoming.grants.regions],
            pages=rank.pool.pages(attempt.id)[: layout.pages_for(len(sequence.tokens) - 1)],
            immediate=incoming.slot.immediate,
            tail=self._receiver.tail_slot(incoming),
            tokens=sequence.tokens,
            budget_s=sequence.deadline - asyncio.get_running_loop().time(),
            digests=incoming.check is not None,
            drafter=self._instance.drafter,
        )

    async def _ask_drained(self, incoming: Incoming, reason: str) -> None:
        cancel = CancelPrefill(
            attempt=incoming.attempt, prefiller=incoming.prefiller, decoder=self._instance.ref, reason=reason
        )
        subject = subjects.inbox("prefill", incoming.prefiller)
        answer: Drained = await self._instance.bus.request(
            subject, cancel, Drained, timeout_s=self._receiver.quarantine_s
        )
        if (answer.attempt, answer.prefiller) != (incoming.attempt, incoming.prefiller):
            raise BusError(f"{incoming.prefiller.name} answered for another attempt")

    def _note(self, attempt: Attempt) -> None:
        attempt.ready_ns = time.monotonic_ns()
        size = plan.kv_bytes(self._instance.layout, attempt.sequence.prompt_tokens, self._instance.tp)
        self._metrics.kv_wait.observe((attempt.ready_ns - attempt.admitted_ns) / 1e9)
        self._metrics.kv_bytes.inc(size)
        attributes = {"kvmesh.bytes": size}
        traces.record("decode.wait_kv", attempt.context, attempt.admitted_ns, attempt.ready_ns, attributes=attributes)


async def _ended(asked: asyncio.Task[None]) -> None:
    """A prefiller that has not answered yet is not waited for: what follows, a cancel, reaches it after the question."""
    asked.cancel()
    await asyncio.wait({asked})
    if not asked.cancelled():
        asked.exception()


async def _came(arrived: asyncio.Task[None]) -> bool:
    """Whether the KV is here although something failed: then no write is left to wait for, and only a word was lost."""
    arrived.cancel()
    await asyncio.wait({arrived})
    return not arrived.cancelled() and arrived.exception() is None
