"""Drafters with KV of their own, in the running batch: a toy executor looks whether what a drafter would read is there."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.decode.scheduler import PlannedRow
from services.decode.sequence import Sequence
from services.decode.speculation import Speculation
from shared.engine.protocol import Row
from tests.unit.test_decode_scheduler import Toy, each_gets_its_own_output, reference, sequence, toy_next, verified

HIDDEN = b"hidden"


class Drafted(Toy):
    """Besides the model's KV a draft model's (`chains`), or that of a multi-token prediction layer, in the same pages: by place,
    the token that was run there, or the one after it. Proposals are right with the given chance."""

    def __init__(self, kind: Any, *, right: float = 0.7, most: int = 4, seed: int = 0, **toy: Any) -> None:
        super().__init__(speculation=Speculation(kind, most, step_tokens=16), **toy)
        self.chains, self.right, self.random = kind == "draft", right, random.Random(seed)
        self.drafter: dict[tuple[int, int], int] = {}

    def admit(self, seq: Sequence) -> bool:
        if not super().admit(seq):
            return False
        for position in range(seq.computed):
            if self.chains:
                self.drafter[self._place(seq, position)] = seq.tokens[position]
            elif position + 1 < seq.computed:
                self.drafter[self._place(seq, position)] = seq.tokens[position + 1]
        seq.hidden = b"" if self.chains or not seq.computed else HIDDEN
        return True

    def step(self) -> bool:
        planned = self.scheduler.plan()
        self.pool.check_integrity()
        free = set(self.pool._free)  # what is in a free page is gone
        self.drafter = {place: token for place, token in self.drafter.items() if place[0] not in free}
        sampled, proposed = [], {}
        for i, row in enumerate(planned):
            sent = row.sequence.row(row.start, row.end, b"", row.drafts, samples=row.samples)
            sampled.append(self._run(row, sent))
            if found := self._follow(row.sequence, sent, sampled[i]):
                proposed[i] = found
        for outcome in self.scheduler.apply(planned, sampled, proposed):
            self.out.setdefault(outcome.sequence.attempt, []).extend(outcome.tokens)
            self.drafted += outcome.drafted
            self.accepted += outcome.accepted
            if outcome.finish:
                self.finish[outcome.sequence.attempt] = outcome.finish
        self.pool.check_integrity()
        self.steps += bool(planned)
        return bool(planned)

    def _run(self, row: PlannedRow, sent: Row) -> list[int]:
        for i, token in enumerate(sent.tokens):
            self._write(row.sequence, sent.start + i, token)
        context = [self.kv[self._place(row.sequence, p)] for p in range(row.end)]
        assert context == row.sequence.tokens[: row.end]
        return verified(context, row.drafts.tokens) if row.samples else []

    def _follow(self, seq: Sequence, sent: Row, drawn: list[int]) -> list[int]:
        """As `shared.models.draft_model` and `shared.models.mtp` do it."""
        stood = sent.tokens[: len(sent.tokens) - sent.drafts + max(0, len(drawn) - 1)]
        tokens = seq.tokens[: sent.start] + stood + drawn[-1:]
        if self.chains:
            assert not sent.hidden
            known = sent.start + min(sent.chained, len(stood))
            self._draft(seq, tokens, known, len(tokens) - (bool(drawn) and not sent.propose))
        else:
            assert sent.chained == 0
            assert sent.following == (None if drawn else seq.tokens[sent.start + len(sent.tokens)])
            after = tokens[1:] + ([] if sent.following is None else [sent.following])
            self._draft(seq, after, sent.start - bool(sent.hidden), len(after))
        return self._propose(seq, tokens, sent.propose)

    def _draft(self, seq: Sequence, tokens: list[int], first: int, end: int) -> None:
        for position in range(first, end):
            self.drafter[self._place(seq, position)] = tokens[position]
        there = [self.drafter.get(self._place(seq, position)) for position in range(end)]
        assert there == tokens[:end], "the drafter's KV is not that of the tokens"

    def _propose(self, seq: Sequence, tokens: list[int], count: int) -> list[int]:
        said: list[int] = []
        for _ in range(count):
            right = toy_next(tokens + said)
            said.append(right if self.random.random() < self.right else 96 - right)
            if len(said) < count:
                position = len(tokens) + len(said) - (1 if self.chains else 2)
                self.drafter[self._place(seq, position)] = said[-1]
        return said


@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_right_proposals_save_steps(kind: str) -> None:
    toy = Drafted(kind, right=1.0, pages=16)
    toy.admit(sequence("a", [1, 2, 3], max_tokens=16))
    toy.run()
    assert toy.out["a"] == reference([1, 2, 3], 16)
    assert (toy.steps, toy.drafted, toy.accepted) == (4, 12, 12), "one to begin, then five tokens a step"
    assert toy.pool.free == 16


@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_wrong_ones_get_rare_and_change_nothing(kind: str) -> None:
    toy = Drafted(kind, right=0.0, pages=32)
    toy.admit(sequence("a", [1, 2, 3], max_tokens=60))
    toy.run()
    assert toy.out["a"] == reference([1, 2, 3], 60)
    assert toy.accepted == 0
    assert toy.drafted < 20


@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_pages_of_proposals_go_to_whoever_needs_them(kind: str) -> None:
    """Two sequences whose tokens fit, but not with what is proposed after them: nobody is preempted."""
    toy = Drafted(kind, right=1.0, pages=14, page_size=2)
    for name, prompt in (("old", [1, 2, 3]), ("young", [4, 5, 6])):
        toy.admit(sequence(name, prompt, max_tokens=11))
    toy.run()
    assert toy.out == {"old": reference([1, 2, 3], 11), "young": reference([4, 5, 6], 11)}
    assert toy.scheduler.preempted == 0
    assert toy.accepted > 0


@pytest.mark.parametrize("kind", ["draft", "mtp"])
def test_one_that_is_computed_again_at_once_is_drafted_for_again(kind: str) -> None:
    """All of it in one row, of which the drafter has nothing."""
    toy = Drafted(kind, right=1.0, pages=8, page_size=4, recompute=100)
    for name, prompt in (("old", [1, 2, 3]), ("young", [4, 5, 6])):
        toy.admit(sequence(name, prompt, max_tokens=20))
    toy.run()
    assert toy.scheduler.preempted > 0
    assert toy.out == {"old": reference([1, 2, 3], 20), "young": reference([4, 5, 6], 20)}


@pytest.mark.parametrize("kind", ["draft", "mtp"])
@pytest.mark.parametrize(("max_tokens", "asked"), [(1, 0), (2, 0), (3, 1), (6, 4), (9, 4)])
def test_no_more_is_asked_for_than_may_come_to_stand(kind: str, max_tokens: int, asked: int) -> None:
    toy = Drafted(kind, pages=16)
    toy.admit(sequence("a", [1, 2, 3], max_tokens=max_tokens))
    assert [row.drafts.propose for row in toy.scheduler.plan()] == [asked]


def test_the_hidden_state_goes_with_the_first_row_alone() -> None:
    toy = Drafted("mtp", pages=16)
    seq = sequence("a", [1, 2, 3], max_tokens=9)
    toy.admit(seq)
    assert seq.row(2, 3, b"", toy.scheduler.plan()[0].drafts, samples=True).hidden == HIDDEN
    toy.scheduler.apply([PlannedRow(seq, 2, 3)], [[toy_next(seq.tokens)]])
    assert seq.hidden == b""


@pytest.mark.parametrize("kind", ["draft", "mtp"])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 96), min_size=1, max_size=12), st.integers(1, 20), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(7, 24),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 2**32),
)
def test_any_mix_gives_each_its_own_output(kind, requests, pages, page_size, recompute, seed):
    """However little memory there is, whoever is preempted or removed, whatever stands of what is proposed."""
    toy = Drafted(kind, seed=seed, pages=pages, page_size=page_size, max_batch=4, recompute=recompute)
    each_gets_its_own_output(toy, requests, pages, page_size)


def test_a_preempted_one_has_nothing_left_of_its_drafter() -> None:
    toy = Drafted("draft", right=1.0, pages=8)
    seq = sequence("a", [1, 2, 3], max_tokens=20)
    toy.admit(seq)
    toy.step()
    seq.hidden = HIDDEN
    assert seq.chained == len(seq.proposed) == 4
    toy.scheduler._preempt(seq)
    assert (seq.computed, seq.chained, seq.proposed, seq.hidden) == (0, 0, [], b"")
    toy.run()
    assert toy.out["a"] == reference([1, 2, 3], 20)
