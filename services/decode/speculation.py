"""Which drafts go with a sequence's row. Pure. `shared.models.verify` has why they change no output."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.decode.draft_length import DraftLength
from services.decode.ngram import Ngrams
from services.decode.sequence import NO_DRAFTS, Drafts, Sequence
from shared.config import InstanceSettings, proposer


class Speculation(msgspec.Struct, frozen=True):
    """`most`: proposals in one row. `step_tokens`: with drafts a step has at most so many tokens, over all rows; a step that has
    more takes as much longer as it has tokens, and a draft costs as much as it may save."""

    proposer: Literal["ngram", "mtp", "draft"]
    most: int
    step_tokens: int = 14

    @property
    def chains(self) -> bool:
        """Whether the KV of what the drafter ran to propose is that of the tokens themselves, and stays."""
        return self.proposer == "draft"

    def drafts(self, sequence: Sequence, room: int) -> Drafts:
        """What the sequence's next row is to verify, fixed here and nowhere else, and what it asks for: at most `room` each."""
        length = sequence.length = sequence.length or DraftLength(self.most)
        useful = _useful(sequence)
        if self.proposer == "ngram":
            most = min(room, length.next(), useful)
            if most < 1:
                return NO_DRAFTS
            lookup = sequence.lookup = sequence.lookup or Ngrams()
            return Drafts(lookup.propose(sequence.tokens, most))
        left = sequence.max_tokens - (len(sequence.tokens) - sequence.prompt_tokens)
        propose = min(room, length.next(), left - 2)
        return Drafts(sequence.proposed[: max(0, min(room, useful))], max(0, propose))


def _useful(sequence: Sequence) -> int:
    """One less than it may still draw. While an output is too short to stop, all places of a row are: what cannot be drawn
    (`Row.forbidden`) is the same in all of them."""
    output = len(sequence.tokens) - sequence.prompt_tokens
    until = sequence.sampling.min_tokens if output < sequence.sampling.min_tokens else sequence.max_tokens
    return min(until, sequence.max_tokens) - output - 1


def speculation_of(settings: InstanceSettings) -> Speculation | None:
    """None: nobody proposes. Raises `ConfigError`."""
    kind = proposer(settings).kind
    return None if kind == "off" else Speculation(kind, settings.draft_tokens)
