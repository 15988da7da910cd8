"""Which tokens of a row with drafts stand: speculative decoding (Leviathan et al., 2023, arXiv 2211.17192; Chen et al., 2023,
arXiv 2302.01318), in a form that leaves the output as it is without, bit by bit.

A row's last `drafts` tokens are proposals. In one forward the model says what it would say after the token before them and after
each of them, and at each of these places a token is drawn as it is without drafts: from logits that do not depend on what else is
in the batch (`shared.models.cpu`), adjusted by the tokens before the place, with the uniform of (seed, position)
(`shared.models.sampling`). A draft stands where it is the token that was drawn in its place. The first that is not ends the row;
what was drawn there is the row's last token, and what was computed after it is dropped.

Why that keeps the model's distribution: by induction every token that stands, and the last one, is the one that is drawn without
drafts, given the same tokens before it. So the output is a function of prompt, sampling and seed alone: drafts decide how many
steps it takes, and nothing else, whoever proposes them, from whatever batch, before or after a preemption. In the papers' terms:
a proposal x made without chance is accepted with probability p(x), and otherwise what comes is distributed as p without x, the
residual: just what drawing from p and comparing does. Where a draft model q draws its proposals, it does so with the same uniform
and the same rules: a coupling of p and q, under which both agree often where p and q are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.messages import Sampling
from shared.models.attention import BatchRow


class Place(NamedTuple):
    """Where a token of row `row` is drawn: after token `token` of all rows' tokens, for `position`, given that `drafts` stand."""

    row: int
    token: int
    position: int
    sampling: Sampling
    drafts: list[int]

    def reached(self, drawn: Sequence[int]) -> bool:
        """Whether this place is the next one after `drawn`, the row's tokens so far: all drafts before it stand."""
        return list(drawn) == self.drafts


def places_of(rows: Sequence[BatchRow]) -> list[Place]:
    """Of all rows that draw, in order; a row's from its first on."""
    places: list[Place] = []
    end = 0
    for i, row in enumerate(rows):
        end += len(row.tokens)
        if row.sample is None:
            continue
        drafts = row.tokens[len(row.tokens) - row.drafts :]
        for after in range(row.drafts + 1):
            token = end - 1 - row.drafts + after
            position = row.start + len(row.tokens) - row.drafts + after
            places.append(Place(i, token, position, row.sample, drafts[:after]))
    return places
