"""Which pair gets a request: the one with the least predicted time to first token. Pure: no I/O, no clock.

    prediction = prefiller's queue and this prompt, at its measured speed
               + decoder's wait for a place in the batch, and one step and a half of it

Both terms take in what this router has sent since the last heartbeat (`tally`). The pair's terms are independent, so the
best pair of a kind is its best prefiller with its best decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from services.router.registry import Instance, Kind, fitting_kinds
from services.router.tally import NOTHING, Share
from shared.messages import InstanceRef

UNMEASURED_PREFILL_TOKENS_PER_S = 1000.0
UNMEASURED_STEP_S = 0.02
"""Assumed until an instance has measured its own; only comparisons with measured instances depend on them."""

TYPICAL_OUTPUT_TOKENS = 128
"""A request in a full batch is assumed to hold its place this long, for the wait of those behind it."""

AHEAD = 4
"""One request per so many places of a decoder's batch may be prefilled ahead of a free place."""

TIE_S = 0.001
TIE_RATIO = 1.02
"""Predictions closer than these are equal, and equals take turns."""

T = TypeVar("T")


class Need(msgspec.Struct, frozen=True):
    """What a request asks of a pair."""

    prompt_tokens: int
    avoid: Mapping[InstanceRef, int] = {}
    """Instances on which this request has just failed, and their count of heartbeats then: not before the next one."""
    alone: bool = False
    """A decoder computes the prompt too."""


class Pair(msgspec.Struct, frozen=True):
    """Where an attempt goes. No prefiller: the decoder computes the prompt too."""

    decoder: Instance
    prefiller: Instance | None

    @property
    def path(self) -> str:
        return "decode" if self.prefiller is None else "prefill+decode"


class NoRoom(msgspec.Struct, frozen=True):
    """Later, perhaps. `personal`: only this request must wait, for what it avoids."""

    reason: str
    personal: bool


class NoPair(msgspec.Struct, frozen=True):
    """Nobody is there who could."""

    reason: str


def choose(
    decoders: Sequence[Instance], prefillers: Sequence[Instance], need: Need, now: float
) -> Pair | NoRoom | NoPair:
    """The pair for a request, among usable instances. Chooses only; `reserve` takes the place."""
    if not decoders:
        return NoPair("no decode instance is ready")
    if need.alone:
        return _alone(decoders, need, now)
    if not prefillers:
        return NoPair("no prefill instance is ready")
    kinds = fitting_kinds(decoders, prefillers)
    if not kinds:
        return NoPair("no prefill and decode instance fit together")
    pairs = [
        found
        for fed, feeding in kinds
        if (found := _best_pair(_of(decoders, fed), _of(prefillers, feeding), need, now)) is not None
    ]
    if (best := _best(pairs, _picked)) is not None:
        return best[1]
    fitting = [known for fed, feeding in kinds for known in (*_of(decoders, fed), *_of(prefillers, feeding))]
    return _no_room(fitting, need)


def _alone(decoders: Sequence[Instance], need: Need, now: float) -> Pair | NoRoom:
    found = _best_decoder(decoders, need)
    return Pair(found[1], None) if found is not None else _no_room(decoders, need)


def _best_pair(
    decoders: Sequence[Instance], prefillers: Sequence[Instance], need: Need, now: float
) -> tuple[float, Pair] | None:
    decoder = _best_decoder(decoders, need)
    prefiller = _best(
        [
            (prefill_wait_s(p, need.prompt_tokens, now), p)
            for p in prefillers
            if _open(p, need) and prefiller_has_room(p)
        ],
        lambda p: (p.picked,),
    )
    if decoder is None or prefiller is None:
        return None
    return decoder[0] + prefiller[0], Pair(decoder[1], prefiller[1])


def _best_decoder(decoders: Sequence[Instance], need: Need) -> tuple[float, Instance] | None:
    able = [(decode_wait_s(d), d) for d in decoders if _open(d, need) and decoder_has_room(d, need)]
    return _best(able, lambda d: (d.picked,))


def _of(instances: Sequence[Instance], kind: Kind) -> list[Instance]:
    return [known for known in instances if known.kind == kind]


def _open(instance: Instance, need: Need) -> bool:
    """Neither known to be full, nor on probation with a request, nor to be avoided until its next heartbeat."""
    if instance.full or (instance.wary and instance.tally.on_the_way) or (instance.half_open and instance.probe):
        return False
    return need.avoid.get(instance.ref) != instance.beats


def _best(scored: Sequence[tuple[float, T]], picked: Callable[[T], tuple[int, ...]]) -> tuple[float, T] | None:
    """The least; of those within a tie of it, the one with the least `picked`: which was chosen longest ago."""
    if not scored:
        return None
    bar = min(score for score, _ in scored) * TIE_RATIO + TIE_S
    return min((found for found in scored if found[0] <= bar), key=lambda found: picked(found[1]))


def _picked(pair: Pair) -> tuple[int, int]:
    """Pairs of different kinds take turns as their decoders do; of one decoder, as their prefillers do."""
    return pair.decoder.picked, 0 if pair.prefiller is None else pair.prefiller.picked


def _no_room(candidates: Sequence[Instance], need: Need) -> NoRoom:
    avoided = [known for known in candidates if need.avoid.get(known.ref) == known.beats]
    if avoided and all(not known.full for known in candidates):
        return NoRoom("the instances on which it failed must be heard of again", personal=True)
    return NoRoom("every instance is busy", personal=False)


def decoder_has_room(decoder: Instance, need: Need) -> bool:
    """A place in the batch, or close behind it, and pages for the prompt and the first growth in one of its pools."""
    capacity = decoder.announce.max_batch
    pages = decoder.announce.layout.pages_for(need.prompt_tokens + 1)
    return _in_batch(decoder) < capacity + capacity // AHEAD and pages <= _free_in_a_pool(decoder)


def _free_in_a_pool(decoder: Instance) -> int:
    """Pages that some pool has free at the least, wherever the decoder put what was sent since its heartbeat: no more than
    that is gone from the largest, and of what is left in all some pool has its share."""
    load, sent = decoder.load, decoder.tally.pages
    return max(load.largest_free_pages - sent, -((sent - load.free_pages) // decoder.announce.dp))


def prefiller_has_room(prefiller: Instance) -> bool:
    return _in_batch(prefiller) < prefiller.announce.max_batch


def _in_batch(instance: Instance) -> int:
    load = instance.load
    return max(0, load.running + load.waiting + instance.tally.requests)


def prefill_wait_s(prefiller: Instance, prompt_tokens: int, now: float) -> float:
    """Until the prompt is computed: what is queued, less what was done since the heartbeat, and the prompt itself."""
    load = prefiller.load
    speed = load.prefill_tokens_per_s or UNMEASURED_PREFILL_TOKENS_PER_S
    queued = max(0.0, load.queued_prefill_tokens - speed * max(0.0, now - prefiller.heard_at))
    return (max(0.0, queued + prefiller.tally.tokens) + prompt_tokens - 1) / speed


def decode_wait_s(decoder: Instance) -> float:
    """From ready KV to the first token: the place in the batch, then the step that runs (half of it, on average) and the
    request's own, longer the fuller the batch is."""
    step = decoder.load.step_s or UNMEASURED_STEP_S
    capacity = decoder.announce.max_batch
    ahead = _in_batch(decoder)
    queue = max(0, ahead + 1 - capacity) * TYPICAL_OUTPUT_TOKENS * step / capacity
    return queue + step * (1.5 + ahead / capacity)


def shares(pair: Pair, prompt_tokens: int) -> tuple[Share, Share]:
    """What an attempt puts on its decoder and its prefiller."""
    decoder = Share(0, pair.decoder.announce.layout.pages_for(prompt_tokens + 1))
    if pair.prefiller is None:
        return decoder, NOTHING
    return decoder, Share(prompt_tokens - 1, pair.prefiller.announce.layout.pages_for(prompt_tokens - 1))


def reserve(pair: Pair, attempt: str, prompt_tokens: int, turn: int) -> None:
    """Counts the attempt on both instances. `turn` grows with every choice."""
    on_decoder, on_prefiller = shares(pair, prompt_tokens)
    for known in _both(pair):
        known.probe = attempt if known.half_open else None
    pair.decoder.tally.send(attempt, on_decoder)
    pair.decoder.picked = turn
    if pair.prefiller is not None:
        pair.prefiller.tally.send(attempt, on_prefiller)
        pair.prefiller.picked = turn


def taken(pair: Pair, attempt: str) -> None:
    """The decoder has accepted it."""
    pair.decoder.tally.take(attempt)
    pair.decoder.wary = False
    if pair.prefiller is not None:
        pair.prefiller.tally.take(attempt)


def prefilled(pair: Pair, attempt: str) -> None:
    """Its first token came: the prefiller is done with it, and both have shown that they work."""
    if pair.prefiller is not None:
        pair.prefiller.tally.end(attempt)
    for known in _both(pair):
        known.half_open, known.probe = False, None


def release(pair: Pair, attempt: str) -> None:
    """It is over. Idempotent."""
    for known in _both(pair):
        known.tally.end(attempt)
        if known.probe == attempt:
            known.probe = None


def _both(pair: Pair) -> list[Instance]:
    return [pair.decoder] if pair.prefiller is None else [pair.decoder, pair.prefiller]
