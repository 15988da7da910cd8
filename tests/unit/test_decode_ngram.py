"""Proposals out of a sequence's own tokens, and how many of them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.decode.draft_length import LONGEST_PAUSE, DraftLength
from services.decode.ngram import INDEXED, LONGEST, SHORTEST, TRIED, Ngrams


def longest_of_all(tokens: list[int], most: int) -> list[int]:
    """The same by looking everywhere."""
    best, at = 0, None
    for place in range(len(tokens) - 1, SHORTEST - 1, -1):
        length = 0
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= SHORTEST and length > best:
            best, at = length, place
    if at is None:
        return []
    copied = list(tokens)
    for i in range(most):
        copied.append(copied[at + i])
    return copied[len(tokens) :]


def test_what_followed_the_same_tokens_before():
    assert Ngrams().propose([1, 2, 3, 4, 5, 1, 2], 3) == [3, 4, 5]
    assert Ngrams().propose([1, 2, 3, 4, 5, 6, 7], 3) == []
    assert Ngrams().propose([2, 3, 4, 5, 9, 3], 3) == [], "one token is too little"


def test_a_longer_stretch_wins_over_a_later_one():
    assert Ngrams().propose([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], 1) == [30]
    assert Ngrams().propose([1, 2, 30, 1, 2, 40, 1, 2], 1) == [40]


def test_a_period_goes_on():
    assert Ngrams().propose([5, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert Ngrams().propose([4, 4, 4], 4) == [4, 4, 4, 4]


def test_a_long_sequence_gets_none():
    assert Ngrams().propose([1] * INDEXED, 2) == [1, 1]
    assert Ngrams().propose([1] * (INDEXED + 1), 2) == []


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 6))
def test_growing_it_finds_what_looking_everywhere_finds(first, then, most):
    ngrams, tokens = Ngrams(), list(first)
    for token in then:
        found = ngrams.propose(tokens, most)
        places = sum(pair == (tokens[-2], tokens[-1]) for pair in itertools.pairwise(tokens))
        if places <= TRIED:
            assert found == longest_of_all(tokens, most)
        assert len(found) in (0, most)
        tokens.append(token)


def test_the_length_follows_what_stands():
    length = DraftLength(6)
    assert length.next() == 6
    length.note(6, 6)
    assert length.next() == 6
    length.note(6, 2)
    assert length.next() == 2
    length.note(2, 2)
    assert length.next() == 3


def test_useless_proposals_get_rare():
    length, asked = DraftLength(4), []
    for _ in range(200):
        asked.append(length.next())
        if asked[-1]:
            length.note(asked[-1], 0)
    tries = [i for i, count in enumerate(asked) if count]
    assert [b - a for a, b in itertools.pairwise(tries)][:4] == [2, 4, 8, 16]
    assert max(b - a for a, b in itertools.pairwise(tries)) == LONGEST_PAUSE + 1
    assert asked[tries[1]] == 1, "and short"
    length.note(1, 1)
    assert length.next() == 2
