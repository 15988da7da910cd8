"""What this router has running, and what it has of each: exactly once, or not at all. Pure: time comes in as an argument.

An attempt ends in one of three ways, and only once: `finish` (every token is here), `failure`, or it is closed by its owner
(the client left, a stop string was found). Its `listener` hears of new tokens at once, in the turn of the event loop in
which they came, and of the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Protocol

from services.router.dispatch import Pair, prefilled, taken
from shared.errors import AttemptFailed
from shared.messages import Emit, EmitBatch, FinishReason, InstanceRef, StreamStatus, Timing, TokenLogprob

PREFILL_STAGES = frozenset({"prefill", "transfer"})
"""Stages whose failure is the prefiller's."""

STAGES = PREFILL_STAGES | {"decode", "decoder", "decode step", "waiting for KV", "grammar"}
"""What a decoder names as the stage of a failure."""


class Listener(Protocol):
    """Whoever owns an attempt. Called synchronously; must not raise."""

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        """`logprobs`: one a token, or none at all."""
        ...

    def on_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """Of the prompt's next tokens, from its second; all before the first `on_tokens` and before a good end."""
        ...

    def on_end(self) -> None:
        """`finish` or `failure` is set now."""
        ...


class Attempt:
    """One try at a request on one pair."""

    __slots__ = (
        "accepted",
        "failure",
        "finish",
        "heard_at",
        "id",
        "listed",
        "listener",
        "missed",
        "number",
        "pair",
        "received",
        "scored",
        "scores",
        "settled",
        "timing",
    )

    def __init__(self, pair: Pair, listener: Listener, now: float, *, scores: int = 0) -> None:
        """`scores`: so many of the prompt's tokens come with their log-probabilities before the first token."""
        self.id = secrets.token_hex(16)
        self.pair = pair
        self.listener = listener
        self.number = 1
        """Which try at its request it is, from 1. One that the decoder did not take is no try."""
        self.accepted = False
        """The decoder has said yes; or shown it, by a first message about the attempt."""
        self.received = 0
        """Tokens here."""
        self.scores, self.scored = scores, 0
        """Of the prompt's tokens: wanted, and here."""
        self.heard_at = now
        self.listed = False
        """The decoder has spoken of it in its stream: from then on it must be in every `StreamStatus`."""
        self.missed = 0
        """Statuses without it, since it was accepted and before it was first listed."""
        self.finish: FinishReason | None = None
        self.failure: AttemptFailed | None = None
        self.timing: Timing | None = None
        self.settled = False
        """The decoder has nothing of it, and knows: no cancel is owed."""

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failure is not None

    def accept(self, now: float) -> None:
        """The decoder has it. Idempotent."""
        if not self.accepted:
            self.accepted = True
            self.heard_at = now
            taken(self.pair, self.id)

    def take(self, emit: Emit, now: float) -> None:
        """New tokens. What is here already is dropped; a gap fails the attempt, for those tokens will not come again."""
        if self.ended:
            return
        self.accept(now)
        self.listed = True
        self.heard_at = now
        if emit.timing is not None:
            self.timing = emit.timing
        if emit.index > self.received:
            lost = emit.index - self.received
            self.fail(AttemptFailed("stream", f"{lost} token(s) were lost on the way", retryable=True))
            return
        if emit.logprobs and len(emit.logprobs) != len(emit.tokens):
            what = f"{len(emit.logprobs)} log-probabilities for {len(emit.tokens)} tokens"
            self.fail(AttemptFailed("stream", what, retryable=True))
            return
        lost = self._take_scores(emit)
        if lost:
            self.fail(AttemptFailed("stream", f"the log-probabilities of {lost} prompt token(s) were lost on the way"))
            return
        known = self.received - emit.index
        fresh = emit.tokens[known:]
        if fresh:
            if not self.received:
                prefilled(self.pair, self.id)
            self.received += len(fresh)
            self.listener.on_tokens(fresh, emit.logprobs[known:])
        if emit.error is not None:
            self.settled = True
            self.fail(_as_told(emit.error, emit.retryable))
        elif emit.finish is not None and not self.ended:
            self.settled = True
            self.finish = emit.finish
            self.listener.on_end()

    def _take_scores(self, emit: Emit) -> int:
        """How many of the prompt's are missing. As with tokens, what is here already is dropped."""
        if emit.scores and emit.scored <= self.scored:
            if fresh := emit.scores[self.scored - emit.scored :]:
                self.scored += len(fresh)
                self.listener.on_prompt(fresh)
        elif emit.scores:
            return emit.scored - self.scored
        return self.scores - self.scored if emit.tokens or emit.finish is not None else 0

    def check(self, emitted: int | None, now: float) -> None:
        """What a status says of it: tokens emitted so far, None where it is not listed. A status is in order with the
        tokens, so a count ahead of ours means loss. One status may have been sent before the attempt was admitted."""
        if self.ended or not self.accepted:
            return
        if emitted is None:
            self.missed += 1
            if self.listed or self.missed > 1:
                self.fail(AttemptFailed("stream", "the decoder does not know the attempt any more"))
            return
        self.listed = True
        self.heard_at = now
        if emitted > self.received:
            self.fail(AttemptFailed("stream", f"{emitted - self.received} token(s) were lost on the way"))

    def fail(self, failure: AttemptFailed) -> None:
        """Ends it badly, unless it has ended."""
        if not self.ended:
            self.failure = failure
            self.listener.on_end()


class AttemptTable:
    """All open attempts, by the instances on which they are."""

    def __init__(self) -> None:
        self._on_decoder: dict[InstanceRef, dict[str, Attempt]] = {}
        self._on_prefiller: dict[InstanceRef, dict[str, Attempt]] = {}
        self.late = 0
        """Messages about attempts that are closed: normal after a cancel."""

    def __len__(self) -> int:
        return sum(map(len, self._on_decoder.values()))

    def __iter__(self) -> Iterator[Attempt]:
        return (attempt for there in list(self._on_decoder.values()) for attempt in list(there.values()))

    def add(self, attempt: Attempt) -> None:
        pair = attempt.pair
        self._on_decoder.setdefault(pair.decoder.ref, {})[attempt.id] = attempt
        if pair.prefiller is not None:
            self._on_prefiller.setdefault(pair.prefiller.ref, {})[attempt.id] = attempt

    def remove(self, attempt: Attempt) -> None:
        """Idempotent."""
        pair = attempt.pair
        _drop(self._on_decoder, pair.decoder.ref, attempt.id)
        if pair.prefiller is not None:
            _drop(self._on_prefiller, pair.prefiller.ref, attempt.id)

    def on_batch(self, batch: EmitBatch, now: float) -> None:
        there = self._on_decoder.get(batch.decoder, {})
        for emit in batch.emits:
            attempt = there.get(emit.attempt)
            if attempt is None:
                self.late += 1
            else:
                attempt.take(emit, now)

    def on_status(self, status: StreamStatus, now: float) -> list[str]:
        """Gives the attempts that the decoder runs for this router, which has them no more: a cancel was lost, or was not
        sent to a decoder that was taken for dead."""
        there = self._on_decoder.get(status.decoder, {})
        forgotten = [attempt for attempt in status.emitted if attempt not in there]
        for known in list(there.values()):
            known.check(status.emitted.get(known.id), now)
        return forgotten

    def on_lost(self, ref: InstanceRef, why: str) -> None:
        """An instance is gone: its attempts fail now. A prefiller takes with it only what has no token yet."""
        for attempt in list(self._on_decoder.get(ref, {}).values()):
            attempt.fail(AttemptFailed("decode", f"the decode instance {ref.name} {why}"))
        for attempt in list(self._on_prefiller.get(ref, {}).values()):
            if not attempt.received:
                attempt.fail(AttemptFailed("prefill", f"the prefill instance {ref.name} {why}"))

    def pardon(self, now: float) -> None:
        """This router could not hear until now: silence counts from here."""
        for attempt in self:
            attempt.heard_at = now

    def sweep(self, now: float, silence_s: float) -> None:
        """Fails accepted attempts of which nothing was heard: the decoder lives and has forgotten them."""
        for attempt in self:
            if attempt.accepted and now - attempt.heard_at > silence_s:
                attempt.fail(AttemptFailed("stream", f"nothing was heard of the attempt for {silence_s:g} s"))


def _drop(on: dict[InstanceRef, dict[str, Attempt]], ref: InstanceRef, attempt: str) -> None:
    there = on.get(ref)
    if there is not None:
        there.pop(attempt, None)
        if not there:
            del on[ref]


def _as_told(error: str, retryable: bool) -> AttemptFailed:
    """A decoder's text names the stage first, where it knows one: "prefill: it is gone"."""
    stage, colon, reason = error.partition(": ")
    if colon and stage in STAGES:
        return AttemptFailed(stage, reason, retryable=retryable)
    return AttemptFailed("decode", error, retryable=retryable)
