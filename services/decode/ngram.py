"""Proposals out of a sequence's own tokens: what followed when its last tokens came before (prompt lookup, Saxena 2023).

The tokens are indexed as LZ77 compressors do it (hash chains, RFC 1951 section 4): every pair of tokens leads to the place where
it ended last, and each place to the one before with the same pair. Of the latest places the one is taken whose tokens before it
agree with the end of the sequence over the longest stretch; among equals the latest. Where what follows reaches that end it
goes on with itself, as an overlapping copy of LZ77 does: a period is proposed again and again.
"""

from __future__ import annotations

from array import array

SHORTEST = 2
"""Tokens that must agree: the pairs that are indexed."""
LONGEST = 16
"""A longer stretch is no better."""
TRIED = 16
"""Places that are looked at for one proposal."""
INDEXED = 32768
"""Of a longer sequence no more tokens are indexed: the index stays below some megabytes."""


class Ngrams:
    """The index of one sequence's tokens, which only grow. Costs per token and per proposal do not depend on their number."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        self._before: array[int] = array("i")
        """By place, the number of tokens up to the pair's end, less 2: the place before with the same pair, or 0."""

    def propose(self, tokens: list[int], most: int) -> list[int]:
        """`most` tokens after `tokens`, which begin with those of the last call; none where their end never came before."""
        if len(tokens) > INDEXED or len(tokens) <= SHORTEST or most < 1:
            return []
        self._index(tokens)
        place = self._longest(tokens)
        if place is None:
            return []
        period = len(tokens) - place
        return [tokens[place + i % period] for i in range(most)]

    def _index(self, tokens: list[int]) -> None:
        """All pairs but the last, which is the one that is looked for."""
        for end in range(len(self._before) + SHORTEST, len(tokens)):
            pair = tokens[end - 2], tokens[end - 1]
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = end

    def _longest(self, tokens: list[int]) -> int | None:
        best, longest = None, 0
        place = self._last.get((tokens[-2], tokens[-1]), 0)
        for _ in range(TRIED):
            if not place:
                break
            length = _agreeing(tokens, place)
            if length > longest:
                best, longest = place, length
            if longest == LONGEST:
                break
            place = self._before[place - SHORTEST]
        return best


def _agreeing(tokens: list[int], place: int) -> int:
    """How many tokens before `place` are those at the end."""
    length = SHORTEST
    while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
