"""Drafts in the running batch: they never change an output, take no page that another needs, and keep none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.ngram import Ngrams
from services.decode.sequence import Drafts, Sequence
from services.decode.speculation import Speculation, speculation_of
from shared.config import DecodeSettings
from shared.errors import ConfigError
from shared.messages import Sampling
from tests.unit.test_decode_scheduler import Toy, each_gets_its_own_output, reference, sequence, toy_next


class Guesses:
    """A proposer that knows the toy model: `right` proposals, and one that is wrong after them."""

    def __init__(self, most: int = 4, *, right: int = 4, step_tokens: int = 64) -> None:
        self.most, self.right, self.step_tokens = most, right, step_tokens

    chains = False

    def drafts(self, seq: Sequence, room: int) -> Drafts:
        tokens = list(seq.tokens)
        for i in range(self.most):
            tokens.append(toy_next(tokens) if i < self.right else 0)
        return Drafts(tokens[len(seq.tokens) :][: max(0, room)])


class Chance(Guesses):
    def __init__(self, seed: int) -> None:
        super().__init__(step_tokens=20)
        self._random = random.Random(seed)

    def drafts(self, seq: Sequence, room: int) -> Drafts:
        self.most, self.right = self._random.randrange(7), self._random.randrange(7)
        return super().drafts(seq, room)


def test_what_stands_saves_steps():
    toy = Toy(pages=16, speculation=Guesses())
    toy.admit(sequence("a", [1, 2, 3], max_tokens=15))
    toy.run()
    assert toy.out["a"] == reference([1, 2, 3], 15)
    assert (toy.steps, toy.drafted, toy.accepted) == (3, 12, 12)
    assert toy.pool.free == 16


def test_what_falls_changes_nothing():
    toy = Toy(pages=16, speculation=Guesses(right=1))
    toy.admit(sequence("a", [1, 2, 3], max_tokens=10))
    toy.run()
    assert toy.out["a"] == reference([1, 2, 3], 10)
    assert (toy.steps, toy.accepted) == (5, 5)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_max_tokens_is_exact(max_tokens):
    settings = DecodeSettings(speculate="ngram", draft_tokens=4)
    prompt = [7, 8, 7, 8, 7]
    toy = Toy(pages=16, speculation=speculation_of(settings))
    toy.admit(sequence("a", prompt, max_tokens=max_tokens))
    toy.run()
    assert toy.out["a"] == reference(prompt, max_tokens)
    toy = Toy(pages=16, speculation=Guesses())
    toy.admit(sequence("a", prompt, max_tokens=max_tokens))
    toy.run()
    assert (toy.out["a"], toy.finish["a"]) == (reference(prompt, max_tokens), "length")


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_among_the_drafts_ends_it_there(place):
    stop = frozenset([reference([1, 2, 3], 6)[place]])
    toy = Toy(pages=16, speculation=Guesses())
    toy.admit(sequence("a", [1, 2, 3], max_tokens=20, stop=stop))
    toy.run()
    assert (toy.out["a"], toy.finish["a"]) == (reference([1, 2, 3], 20, stop), "stop")
    assert toy.pool.free == 16


def test_the_last_position_is_the_last():
    toy = Toy(pages=8, speculation=Guesses())
    toy.scheduler._max_positions = 7
    toy.admit(sequence("a", [1, 2, 3], max_tokens=100))
    while rows := toy.scheduler.plan():
        assert rows[0].end + len(rows[0].drafts.tokens) <= 6
        toy.scheduler.apply(rows, [[toy_next(rows[0].sequence.tokens)]])
    assert len(rows) == 0


def test_a_step_has_so_many_tokens_and_all_have_a_share():
    toy = Toy(pages=64, speculation=Guesses(step_tokens=8))
    for name in "abcd":
        toy.admit(sequence(name, [ord(name)], max_tokens=30))
    rows = toy.scheduler.plan()
    assert sorted(len(row.drafts.tokens) for row in rows) == [1, 1, 1, 1]
    toy.scheduler.apply(rows, [[toy_next(row.sequence.tokens)] for row in rows])
    for name in "efgh":
        toy.admit(sequence(name, [ord(name)], max_tokens=30))
    assert not any(row.drafts.tokens for row in toy.scheduler.plan())


def test_nobody_is_preempted_for_a_draft():
    """Both fit until they end, with no page left over."""
    toy = Toy(pages=6, page_size=2, speculation=Guesses())
    toy.admit(sequence("old", [1, 2, 3], max_tokens=3))
    toy.admit(sequence("young", [4, 5, 6], max_tokens=3))
    toy.run()
    assert toy.scheduler.preempted == 0
    assert toy.out == {"old": reference([1, 2, 3], 3), "young": reference([4, 5, 6], 3)}


def test_drafts_go_where_there_are_pages():
    toy = Toy(pages=3, page_size=2, speculation=Guesses())
    toy.admit(sequence("a", [1, 2, 3], max_tokens=3))
    (row,) = toy.scheduler.plan()
    assert (row.end, len(row.drafts.tokens)) == (3, 3), "three pages have six places"
    assert toy.pool.free == 0
    toy.scheduler.apply([row], [[toy_next([1, 2, 3])]])
    assert toy.pool.free == 1


def test_an_output_too_short_to_stop_gets_no_drafts_beyond_that():
    """What cannot be drawn is one list for all places of a row."""
    speculation = Speculation("ngram", 6)
    seq = sequence("a", [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=20)
    seq.sampling = Sampling(temperature=0, min_tokens=3)
    assert speculation.drafts(seq, 10).tokens == [3, 1]
    seq.tokens += [3, 1]
    assert speculation.drafts(seq, 10).tokens == []
    seq.tokens += [2]
    assert len(speculation.drafts(seq, 10).tokens) == 6


def test_no_proposal_no_index():
    seq = sequence("a", [1, 2, 3, 1, 2], max_tokens=1)
    assert Speculation("ngram", 6).drafts(seq, 10).tokens == []
    assert seq.lookup is None
    seq.max_tokens = 2
    assert Speculation("ngram", 6).drafts(seq, 10).tokens == [3]
    assert isinstance(seq.lookup, Ngrams)


def test_a_bad_setting_says_what_it_takes():
    assert speculation_of(DecodeSettings()) is None
    with pytest.raises(ConfigError, match="KVMESH_SPECULATE='guess': takes off"):
        speculation_of(DecodeSettings(speculate="guess"))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 96), min_size=1, max_size=12), st.integers(1, 14), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(7, 24),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 2**32),
)
def test_any_mix_gives_each_its_own_output(requests, pages, page_size, recompute, seed):
    """However little memory there is, whoever is preempted or removed, whatever is proposed."""
    toy = Toy(pages=pages, page_size=page_size, max_batch=4, recompute=recompute, speculation=Chance(seed))
    each_gets_its_own_output(toy, requests, pages, page_size)
