"""One attempt as the decoder knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.engine.ints import pack_ints
from shared.engine.protocol import Row
from shared.messages import FinishReason, Generate, InstanceRef, Sampling, Scoring


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
    prompt_logprobs: int | None = None
    scored: int = 0
    """Of the prompt's tokens, the first not counted: their log-probabilities are out."""

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

    def row(self, start: int, end: int, pages: bytes, *, samples: bool) -> Row:
        """Its positions [start, end) in a step. The tokens so far go along only where the draw looks at them."""
        tokens = self.tokens[start:end]
        scoring = None if self.prompt_logprobs is None else self._scoring(start, end, self.prompt_logprobs)
        if not samples:
            return Row(tokens=tokens, start=start, pages=pages, scoring=scoring)
        output = len(self.tokens) - self.prompt_tokens
        return Row(
            tokens=tokens,
            start=start,
            pages=pages,
            sample=self.sampling,
            history=pack_ints(self.tokens) if self.sampling.looks_back else b"",
            prompt_tokens=self.prompt_tokens,
            forbidden=list(self.stop_token_ids) if output < self.sampling.min_tokens else [],
            scoring=scoring,
        )

    def _scoring(self, start: int, end: int, top: int) -> Scoring | None:
        """What positions [start, end) say of the prompt that is not out yet: of one that is recomputed, nothing twice."""
        first, last = max(start, self.scored), min(end, self.prompt_tokens - 1)
        return Scoring(first - start, self.tokens[first + 1 : last + 1], top) if first < last else None


@dataclass(slots=True)
class Outcome:
    """What a step made of one sequence: at most one new token, and whether it ended it. A stop token is not emitted."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    row: int = 0
    """Of the step."""
