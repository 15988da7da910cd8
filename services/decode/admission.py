"""Whether a decoder takes a request, and which of its data parallel ranks: decided at once, before anything is reserved. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from shared.kv.shards import layouts_fit
from shared.layout import KvLayout
from shared.messages import Generate, InstanceRef, ModelIdentity, RefusedReply


@dataclass(frozen=True)
class Room:
    """A data parallel rank at this moment. Admission counts free pages only: what runs, is reserved, in transit or quarantined
    is not there to be given."""

    free_pages: int
    starved: bool
    """A preempted sequence waits for pages."""
    attempts: int
    """That run or wait there."""
    picked: int
    """When it was last chosen, in choices."""


@dataclass(frozen=True)
class Capacity:
    """The decoder at this moment."""

    me: InstanceRef
    model: ModelIdentity
    layout: KvLayout
    tp: int
    pool_pages: int
    """Pages of each rank's pool, free or not."""
    ranks: Sequence[Room]
    waiting: int
    max_waiting: int
    draining: bool
    attempts: Container[str]
    drafter: str = ""
    """As in `Announce`."""


def pages_at_admission(layout: KvLayout, prompt_tokens: int) -> int:
    """Pages for the prompt and the first growth: the first generated token always has a place."""
    return layout.pages_for(prompt_tokens + 1)


def decide(generate: Generate, now: Capacity) -> RefusedReply | int:
    """Why not, or the number of the rank that takes it."""

    def no(code: str, reason: str, *, retryable: bool = True) -> RefusedReply:
        return RefusedReply(attempt=generate.attempt, code=code, reason=reason, retryable=retryable)  # type: ignore[arg-type]

    prompt = len(generate.tokens)
    if generate.decoder != now.me:
        return no("stale_incarnation", f"this is {now.me.name} {now.me.incarnation:016x}")
    if generate.attempt in now.attempts:
        return no("duplicate", "an attempt with this id is already here", retryable=False)
    if not prompt or generate.max_tokens < 0:
        return no("invalid", "the prompt is empty, or max_tokens is below 0", retryable=False)
    if prompt >= now.model.max_positions:
        return no(
            "invalid", f"{prompt} prompt tokens; the model has {now.model.max_positions} positions", retryable=False
        )
    if any(not 0 <= token < now.model.vocab_size for token in generate.tokens):
        return no("invalid", f"a token id is outside 0 to {now.model.vocab_size - 1}", retryable=False)
    if any(
        not 0 <= token < now.model.vocab_size for token in (*generate.sampling.logit_bias, *generate.stop_token_ids)
    ):
        reason = f"a token id of logit_bias or stop_token_ids is outside 0 to {now.model.vocab_size - 1}"
        return no("invalid", reason, retryable=False)
    named = {*generate.stop_token_ids, *generate.sampling.logit_bias}
    if any(not 0 <= token < now.model.vocab_size for token in named):
        return no("invalid", f"a stop or biased token is outside 0 to {now.model.vocab_size - 1}", retryable=False)
    longest = now.layout.pages_for(min(prompt + max(1, generate.max_tokens), now.model.max_positions))
    if longest > now.pool_pages:
        return no("invalid", f"prompt and output need {longest} pages; the pool has {now.pool_pages}", retryable=False)
    if (mismatch := _mismatch(generate, now)) is not None:
        return no("mismatch", mismatch)
    if now.draining:
        return no("draining", "this decoder is leaving")
    if now.waiting >= now.max_waiting:
        return no("busy", f"{now.waiting} admitted requests wait already")
    pages = pages_at_admission(now.layout, prompt)
    rank = choose(now.ranks, pages)
    return no("busy", f"{pages} page(s) are wanted; free are {_shown(now)}") if rank is None else rank


def choose(ranks: Sequence[Room], pages: int) -> int | None:
    """Of the ranks that can give `pages` pages the one with the fewest attempts, then with the most free pages; equals take
    turns. None: no rank can."""
    able = [number for number, room in enumerate(ranks) if pages <= room.free_pages and not room.starved]
    return min(able, key=lambda n: (ranks[n].attempts, -ranks[n].free_pages, ranks[n].picked), default=None)


def _shown(now: Capacity) -> str:
    owed = {False: "", True: " (which a preempted request waits for)"}
    return ", ".join(f"{room.free_pages} of {now.pool_pages}{owed[room.starved]}" for room in now.ranks)


def _mismatch(generate: Generate, now: Capacity) -> str | None:
    prefiller = generate.prefiller
    if prefiller is None:
        return None if generate.alone else "no prefiller is named, and the prompt has more than one token"
    if prefiller.drafter != now.drafter:
        ours, theirs = (name or "no drafter" for name in (now.drafter, prefiller.drafter))
        return f"speculate differs: prefiller has {theirs}, decoder has {ours}"
    if prefiller.layout != now.layout:
        return f"layout differs: prefiller has {prefiller.layout}, decoder has {now.layout}"
    if not layouts_fit(now.layout, prefiller.tp, now.tp):
        return (
            f"tp does not fit: prefiller has {prefiller.tp}, decoder has {now.tp}, {now.layout.num_kv_heads} KV heads"
        )
    if prefiller.model.digest != now.model.digest:
        return f"model differs: prefiller has {prefiller.model.digest}, decoder has {now.model.digest}"
    return None
