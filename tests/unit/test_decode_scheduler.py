"""Continuous batching without I/O: a toy model whose next token is a function of all tokens so far."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import NO_DRAFTS, Outcome, Sequence
from shared.errors import GrammarError
from shared.kv.ledger import PagePool
from shared.messages import InstanceRef, Sampling

ROUTER = InstanceRef("router", 1)
STOP = 0


def toy_next(tokens: list[int]) -> int:
    """Depends on every token and its place, so that a lost or doubled one shows. 1 to 96."""
    return sum((i + 1) * t for i, t in enumerate(tokens)) % 96 + 1


def reference(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        token = toy_next(tokens)
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def verified(tokens: list[int], drafts: list[int]) -> list[int]:
    """What the toy model draws after `tokens`, and after each draft that stands."""
    drawn = [toy_next(tokens)]
    for draft in drafts:
        if draft != drawn[-1]:
            break
        drawn.append(toy_next(tokens + drawn))
    return drawn


def sequence(name: str, prompt: list[int], max_tokens: int = 8, stop: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(
        attempt=name,
        router=ROUTER,
        tokens=list(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(temperature=0),
        max_tokens=max_tokens,
        stop_token_ids=stop,
        deadline=1e9,
        computed=len(prompt) - 1,
    )


class Toy:
    """The scheduler with its pool and the toy model; KV is a dict so that a row without its KV in place shows."""

    def __init__(
        self, pages: int, page_size: int = 4, max_batch: int = 8, recompute: int = 5, speculation: Any = None
    ) -> None:
        self.pool = PagePool(pages)
        self.scheduler = DecodeScheduler(
            self.pool,
            page_size,
            max_batch=max_batch,
            max_positions=10_000,
            recompute_tokens=recompute,
            speculation=speculation,
        )
        self.page_size = page_size
        self.kv: dict[tuple[int, int], int] = {}
        self.out: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.widest = 0
        self.steps = 0
        self.drafted = self.accepted = 0

    def admit(self, seq: Sequence) -> bool:
        need = -(-(len(seq.tokens) + 1) // self.page_size)
        if self.pool.reserve(seq.attempt, need, "running") is None:
            return False
        for position in range(seq.computed):
            self._write(seq, position)
        self.scheduler.add(seq)
        return True

    def _place(self, seq: Sequence, position: int) -> tuple[int, int]:
        return self.pool.pages(seq.attempt)[position // self.page_size], position % self.page_size

    def _write(self, seq: Sequence, position: int, token: int | None = None) -> None:
        self.kv[self._place(seq, position)] = seq.tokens[position] if token is None else token

    def step(self) -> bool:
        rows = self.scheduler.plan()
        self.pool.check_integrity()
        self.widest = max(self.widest, len(rows))
        sampled: list[list[int]] = []
        for row in rows:
            for position in range(row.start, row.end):
                self._write(row.sequence, position)
            context = [self.kv[self._place(row.sequence, p)] for p in range(row.end)]
            assert context == row.sequence.tokens[: row.end], "the KV in place is not the request's"
            for i, draft in enumerate(row.drafts.tokens):
                self._write(row.sequence, row.end + i, draft)
            sampled.append(verified(context, row.drafts.tokens) if row.samples else [])
        for outcome in self.scheduler.apply(rows, sampled):
            self.out.setdefault(outcome.sequence.attempt, []).extend(outcome.tokens)
            self.drafted += outcome.drafted
            self.accepted += outcome.accepted
            if outcome.finish:
                self.finish[outcome.sequence.attempt] = outcome.finish
        self.pool.check_integrity()
        for seq in self.scheduler.running:
            held, needed = len(self.pool.pages(seq.attempt)), -(-(len(seq.tokens) + 1) // self.page_size)
            assert held <= needed, "pages are kept for drafts that fell"
        self.steps += bool(rows)
        return bool(rows)

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("the batch does not end")


def test_one_sequence_ends_by_length_and_frees_its_pages():
    toy = Toy(pages=4)
    toy.admit(sequence("a", [1, 2, 3], max_tokens=5))
    toy.run()
    assert toy.out["a"] == reference([1, 2, 3], 5)
    assert toy.finish == {"a": "length"}
    assert toy.pool.free == 4


def test_one_token_is_one_token():
    toy = Toy(pages=4)
    toy.admit(sequence("a", [7], max_tokens=1))
    toy.run()
    assert (toy.out["a"], toy.finish["a"]) == (reference([7], 1), "length")


def test_a_stop_token_ends_it_and_is_not_output():
    first = reference([1, 2, 3], 1)[0]
    second = reference([1, 2, 3], 2)[1]
    toy = Toy(pages=8)
    toy.admit(sequence("a", [1, 2, 3], stop=frozenset([second])))
    toy.admit(sequence("b", [1, 2, 3], stop=frozenset([first])))
    toy.run()
    assert toy.out == {"a": [first], "b": []}
    assert toy.finish == {"a": "stop", "b": "stop"}


def test_max_positions_ends_it():
    toy = Toy(pages=8)
    toy.scheduler._max_positions = 5
    toy.admit(sequence("a", [1, 2, 3], max_tokens=100))
    toy.run()
    assert (len(toy.out["a"]), toy.finish["a"]) == (2, "length")


def test_the_batch_is_bounded_and_first_come_first_served():
    toy = Toy(pages=64, max_batch=2)
    for name in "abcd":
        toy.admit(sequence(name, [ord(name)], max_tokens=3))
    toy.run()
    assert toy.widest == 2
    assert list(toy.finish) == ["a", "b", "c", "d"]


def test_the_youngest_is_preempted_and_its_output_does_not_change():
    toy = Toy(pages=6, page_size=2)
    old, young = sequence("old", [1, 2, 3], max_tokens=6), sequence("young", [4, 5, 6], max_tokens=6)
    toy.admit(old)
    toy.admit(young)
    toy.run()
    assert toy.scheduler.preempted > 0
    assert old.preemptions == 0
    assert toy.out == {"old": reference([1, 2, 3], 6), "young": reference([4, 5, 6], 6)}
    assert toy.pool.free == 6


def test_a_starved_sequence_is_seen():
    toy = Toy(pages=5, page_size=2)
    toy.admit(sequence("old", [1, 2, 3], max_tokens=7))
    toy.admit(sequence("young", [4, 5, 6], max_tokens=3))
    assert not toy.scheduler.starved
    while not toy.scheduler.preempted:
        toy.step()
    assert toy.scheduler.starved
    toy.run()
    assert not toy.scheduler.starved


def test_a_preempted_one_does_not_block_those_that_hold_what_it_waits_for():
    """It ran alone and grew while the KV of two others was on its way to pages of theirs."""
    toy = Toy(pages=8)
    for name, pages in (("second", 3), ("third", 1)):
        toy.pool.reserve(name, pages, "in_transit")
    first = sequence("first", list(range(1, 13)), max_tokens=8)
    assert toy.admit(first)
    while toy.step():
        pass
    assert first.preemptions == 1
    later = [sequence("second", list(range(1, 9))), sequence("third", [1, 2, 3], max_tokens=1)]
    for one in later:
        toy.pool.release(one.attempt)
        assert toy.admit(one)
    toy.run()
    assert toy.out == {
        one.attempt: reference(one.tokens[: one.prompt_tokens], one.max_tokens) for one in (first, *later)
    }
    assert toy.pool.free == 8


def test_removed_in_every_state():
    toy = Toy(pages=64, max_batch=1)
    running, ready = sequence("running", [1, 2]), sequence("ready", [3, 4])
    toy.admit(running)
    toy.admit(ready)
    toy.step()
    toy.scheduler.remove(ready)
    toy.scheduler.remove(ready)
    assert not toy.pool.pages("ready")
    rows = toy.scheduler.plan()
    toy.scheduler.remove(running)
    assert toy.pool.pages("running"), "the step that is running still uses its pages"
    assert toy.scheduler.apply(rows, [[5]]) == []
    toy.pool.check_integrity()
    assert toy.pool.free == 64


def test_a_failed_step_frees_everything():
    toy = Toy(pages=16)
    wanted, unwanted = sequence("a", [1, 2]), sequence("b", [3, 4])
    toy.admit(wanted)
    toy.admit(unwanted)
    rows = toy.scheduler.plan()
    toy.scheduler.remove(unwanted)
    assert toy.scheduler.fail(rows) == [wanted]
    assert toy.pool.free == 16


def each_gets_its_own_output(toy, requests, pages, page_size):
    """`requests`: (prompt, max_tokens, whether it is removed once it is in)."""
    expected, waiting = {}, []
    for number, (prompt, max_tokens, removed) in enumerate(requests):
        if -(-(len(prompt) + max_tokens) // page_size) > pages:
            continue
        waiting.append((sequence(str(number), prompt, max_tokens), removed))
        if not removed:
            expected[str(number)] = reference(prompt, max_tokens)
    for _ in range(5_000):
        if waiting and not toy.scheduler.starved and toy.admit(waiting[0][0]):
            seq, removed = waiting.pop(0)
            if removed:
                toy.scheduler.remove(seq)
        if not toy.step() and not waiting:
            break
    assert {name: toy.out[name] for name in expected} == expected
    assert toy.pool.free == pages


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 96), min_size=1, max_size=12), st.integers(1, 14), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(7, 24),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_any_mix_gives_each_its_own_output(requests, pages, page_size, recompute):
    """However little memory there is, whoever is preempted or removed, each output is the reference's."""
    toy = Toy(pages=pages, page_size=page_size, max_batch=4, recompute=recompute)
    each_gets_its_own_output(toy, requests, pages, page_size)


def test_a_prompt_with_nothing_to_follow_is_computed_in_chunks_and_ends() -> None:
    pool = PagePool(8)
    scheduler = DecodeScheduler(pool, 4, max_batch=2, max_positions=100, recompute_tokens=5)
    seq = sequence("a", list(range(1, 13)), max_tokens=0)
    seq.computed = 0
    pool.reserve("a", 4, "running")
    scheduler.add(seq)
    ranges = []
    while rows := scheduler.plan():
        (row,) = rows
        assert not row.samples
        ranges.append((row.start, row.end))
        outcomes = scheduler.apply(rows, [[]])
        pool.check_integrity()
    assert ranges == [(0, 5), (5, 10), (10, 12)]
    assert [(outcome.tokens, outcome.finish) for outcome in outcomes] == [([], "length")]
    assert pool.free == 8


def test_rows_score_each_prompt_token_once_however_often_they_are_computed() -> None:
    seq = sequence("a", [10, 11, 12, 13, 14])
    seq.prompt_logprobs = 2
    first = seq.row(0, 3, b"", NO_DRAFTS, samples=False).scoring
    assert first is not None
    assert (first.first, first.targets, first.top) == (0, [11, 12, 13], 2)
    seq.scored = 3
    seq.tokens.append(15)
    again = seq.row(0, 6, b"", NO_DRAFTS, samples=True).scoring
    assert again is not None
    assert (again.first, again.targets) == (3, [14]), "of the output nothing"
    seq.scored = 4
    assert seq.row(0, 6, b"", NO_DRAFTS, samples=True).scoring is None


class Only:
    """A matcher of one text; the rest of its interface is not used here."""

    def __init__(self, *text: int) -> None:
        self.left = list(text)

    @property
    def finished(self) -> bool:
        return not self.left

    def accept(self, token: int) -> None:
        if not self.left or self.left.pop(0) != token:
            raise GrammarError(f"{token} is not allowed")


def test_a_complete_output_ends_with_stop_and_a_wrong_token_with_an_error() -> None:
    expected = reference([1, 2, 3], 8)
    toy = Toy(8)
    complete, longest = sequence("complete", [1, 2, 3]), sequence("longest", [1, 2, 3], max_tokens=3)
    wrong, stopped = sequence("wrong", [1, 2, 3]), sequence("stopped", [1, 2, 3], stop=frozenset({expected[0]}))
    for matched, text in ((complete, expected[:3]), (longest, expected[:3]), (wrong, [expected[0], 0]), (stopped, [0])):
        matched.matcher = Only(*text)  # type: ignore[assignment]
        assert toy.admit(matched)
    ended: dict[str, Outcome] = {}
    while rows := toy.scheduler.plan():
        outcomes = toy.scheduler.apply(rows, [[toy_next(row.sequence.tokens)] for row in rows])
        ended |= {outcome.sequence.attempt: outcome for outcome in outcomes if outcome.finish or outcome.error}
        toy.pool.check_integrity()
    assert {name: outcome.finish for name, outcome in ended.items()} == {
        "complete": "stop",
        "longest": "stop",
        "stopped": "stop",
        "wrong": None,
    }
    assert ended["complete"].tokens == [expected[2]]
    assert ended["stopped"].tokens == []
    assert ended["wrong"].tokens == []
    assert str(ended["wrong"].error) == f"{expected[1]} is not allowed"
    assert toy.pool.free == toy.pool.num_pages
