"""Models that propose tokens, and how they take part in a step: `shared.models.draft_model` and `shared.models.mtp`.

A drafter keeps KV of its own, in the same pages as the model's. After each step of the model it *follows*: it computes what it
lacks of the tokens that the step made certain, and goes on from there, token by token, where proposals are asked for. What it
wrote for tokens that never come to stand is overwritten when those that do are computed.

A proposal is drawn as the model's own tokens are, with the same sampling and the uniform of its position: the closer the two
distributions, the more often it is the very token that the model draws (`shared.models.verify`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from shared.errors import RowsFailed
from shared.models import _kernels
from shared.models.adjust import adjust
from shared.models.attention import BatchRow
from shared.models.collective import Collective
from shared.models.cpu import Floats
from shared.models.sampling import sample
from shared.models.verify import Place

AfterLayer = Callable[[], None] | None


class Span(NamedTuple):
    """Tokens at positions start, start + 1, ...: what attention must know of a row."""

    tokens: list[int]
    start: int
    pages: bytes


class Followed(NamedTuple):
    """`proposed`: of each row, none where none was asked for. `hidden`: by row, what the next step will be given
    (`BatchRow.hidden`)."""

    proposed: list[list[int]]
    hidden: dict[int, bytes]


class Drafter(Protocol):
    def follow(
        self, rows: Sequence[BatchRow], drawn: Sequence[list[int]], x: Floats, after_layer: AfterLayer
    ) -> Followed:
        """After the model's forward over `rows`, which left its last hidden states `x`, and `drawn`, the rows' tokens; all ranks
        of a tensor parallel group together. `after_layer` is called once a layer, when its K and V are there. Raises
        `RowsFailed`, in all ranks."""
        ...


def stood(row: BatchRow, drawn: Sequence[int]) -> list[int]:
    """Of the row's tokens those that are certain after the step."""
    return row.tokens[: len(row.tokens) - row.drafts + max(0, len(drawn) - 1)]


class Drawer:
    """Draws tokens where all ranks of a tensor parallel group need to know them: rank 0 draws, the others are told."""

    def __init__(self, context: _kernels.Context, tensor: Collective | None) -> None:
        self._context, self._tensor = context, tensor

    def draw(self, logits: Floats, places: Sequence[Place], rows: Sequence[BatchRow]) -> list[int]:
        """One token a place; `logits` `[places, vocab]` in rank 0. Raises `RowsFailed`, in all ranks."""
        if self._tensor is not None and self._tensor.rank:
            return [tokens[0] for tokens in told(self._tensor, [[]] * len(places), 1)]
        try:
            for at, place in zip(logits, places, strict=True):
                adjust(at, rows[place.row], place.drafts, masked=False)
            tokens = sample(self._context, logits, [p.sampling for p in places], [p.position for p in places])
        except ValueError as error:
            tell_failure(self._tensor, len(places), 1)
            raise RowsFailed(str(error)) from None
        if self._tensor is not None:
            told(self._tensor, [[token] for token in tokens], 1)
        return tokens


def told(tensor: Collective, tokens: Sequence[list[int]], width: int) -> list[list[int]]:
    """Rank 0's `tokens`, at most `width` a row, in all ranks, which call it with as many rows. Raises `RowsFailed` where rank 0
    called `tell_failure`."""
    values = np.zeros((len(tokens) + 1, width), np.float32)  # which has all whole numbers below 2**24
    if tensor.rank == 0:
        for i, row in enumerate(tokens):
            values[i, : len(row)] = np.array(row, np.float32) + 1
    tensor.all_reduce_sum(values)
    if values[-1, 0]:
        raise RowsFailed("rank 0 could not draw its tokens")
    return [[int(value) - 1 for value in row if value] for row in values[:-1]]


def tell_failure(tensor: Collective | None, rows: int, width: int) -> None:
    """Rank 0, in place of `told`."""
    if tensor is not None:
        values = np.zeros((rows + 1, width), np.float32)
        values[-1, 0] = 1
        tensor.all_reduce_sum(values)


class Chain(NamedTuple):
    """How a drafter goes on: `logits` of hidden states, `run` of spans of one token with the hidden states before them to hidden
    states, and how far before its own position a token's KV is (`behind`)."""

    logits: Callable[[Floats], Floats]
    run: Callable[[list[Span], Floats], Floats]
    behind: int = 0


def propose(
    chain: Chain, drawer: Drawer, rows: Sequence[BatchRow], drawn: Sequence[list[int]], asking: Sequence[int], x: Floats
) -> list[list[int]]:
    """`row.propose` tokens for each row of `asking`, whose last hidden states are `x` `[asking, hidden]`; none for the others."""
    proposed: list[list[int]] = [[] for _ in rows]
    going = list(asking)
    while going:
        places = [_next_place(i, rows[i], drawn[i], proposed[i]) for i in going]
        for place, token in zip(places, drawer.draw(chain.logits(x), places, rows), strict=True):
            proposed[place.row].append(token)
        left = [n for n, i in enumerate(going) if len(proposed[i]) < rows[i].propose]
        if not left:
            break
        spans = [Span(proposed[going[n]][-1:], places[n].position - chain.behind, rows[going[n]].pages) for n in left]
        x, going = chain.run(spans, x[left]), [going[n] for n in left]
    return proposed


def _next_place(index: int, row: BatchRow, drawn: list[int], proposed: list[int]) -> Place:
    assert row.sample is not None, "a row that draws"
    position = row.start + len(row.tokens) - row.drafts + len(drawn) + len(proposed)
    return Place(index, 0, position, row.sample, drawn + proposed)
