"""One attempt as the decoder knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from services.decode.draft_length import DraftLength
from services.decode.ngram import Ngrams
from shared.engine.ints import pack_ints
from shared.engine.protocol import Row
from shared.errors import GrammarError
from shared.grammar import Matcher
from shared.messages import FinishReason, Generate, InstanceRef, Sampling, Scoring


class Drafts(NamedTuple):
    """Of one row: proposals that are verified in it, and how many are asked for, after what it makes, for the next."""

    tokens: list[int]
    propose: int = 0


NO_DRAFTS = Drafts([])


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; the KV of the first `computed` of them is in the attempt's pages."""

    attempt: str
    router: InstanceRef
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    deadline: float
    """On the event loop's clock."""
    computed: int = 0
    emitted: int = 0
    order: int = 0
    """Among all that became ready: the smaller the older."""
    preemptions: int = 0
    cancelled: bool = False
    length: DraftLength | None = None
    """How much to propose; None until something was asked for."""
    lookup: Ngrams | None = None
    """Where its proposals come from its own tokens."""
    matcher: Matcher | None = None
    """Of its grammar, where it has one: it has accepted what was generated, whether or not its KV is here."""
    proposed: list[int] = field(default_factory=list)
    """What a drafter proposes after `tokens`."""
    chained: int = 0
    """As in `Row`, of the next one."""
    hidden: bytes = b""
    """As in `Row`, of the first one after the prefiller's."""
    prompt_logprobs: int | None = None
    scored: int = 0
    """Of the prompt's tokens, the first not counted: their log-probabilities are out."""
    drafted: int = 0
    accepted: int = 0
    """Of the drafted tokens those that stood, over all steps."""

    @classmethod
    def of(cls, generate: Generate, now: float) -> Sequence:
        return cls(
            attempt=generate.attempt,
            router=generate.router,
            tokens=list(generate.tokens),
            prompt_tokens=len(generate.tokens),
            sampling=generate.sampling,
            max_tokens=generate.max_tokens,
            stop_token_ids=frozenset(generate.stop_token_ids),
            deadline=now + generate.budget_s,
            prompt_logprobs=generate.prompt_logprobs,
        )

    def forget_kv(self) -> None:
        """All of it: it will be computed again, from the first token."""
        self.computed, self.proposed, self.chained, self.hidden = 0, [], 0, b""

    def row(self, start: int, end: int, pages: bytes, drafts: Drafts, *, samples: bool, mask: bytes = b"") -> Row:
        """Its positions [start, end) in a step, and `drafts` after them. The tokens so far go along only where the draw looks at
        them."""
        tokens = self.tokens[start:end] + drafts.tokens
        scoring = None if self.prompt_logprobs is None else self._scoring(start, end, self.prompt_logprobs)
        if not samples:
            following = self.tokens[end] if end < len(self.tokens) else None
            return Row(tokens=tokens, start=start, pages=pages, following=following, scoring=scoring)
        output = len(self.tokens) - self.prompt_tokens
        return Row(
            tokens=tokens,
            start=start,
            pages=pages,
            sample=self.sampling,
            drafts=len(drafts.tokens),
            propose=drafts.propose,
            chained=min(self.chained, len(tokens)),
            hidden=self.hidden,
            history=pack_ints(self.tokens) if self.sampling.looks_back else b"",
            prompt_tokens=self.prompt_tokens,
            mask=mask,
            forbidden=list(self.stop_token_ids) if output < self.sampling.min_tokens else [],
            scoring=scoring,
        )

    def _scoring(self, start: int, end: int, top: int) -> Scoring | None:
        """What positions [start, end) say of the prompt that is not out yet: of one that is recomputed, nothing twice."""
        first, last = max(start, self.scored), min(end, self.prompt_tokens - 1)
        return Scoring(first - start, self.tokens[first + 1 : last + 1], top) if first < last else None


@dataclass(slots=True)
class Outcome:
    """What a step made of one sequence: its new tokens, and whether they ended it. A stop token is not emitted, nor what was
    drawn after it. `accepted` of `drafted` proposals stood."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: GrammarError | None = None
    """It has ended badly."""
    row: int = 0
    """Of the step."""
    drafted: int = 0
    accepted: int = 0
