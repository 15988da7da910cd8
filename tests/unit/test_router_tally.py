"""What was sent since the last heartbeat counts once: until a heartbeat that can know of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.tally import Share, Tally


def test_an_attempt_counts_until_a_heartbeat_knows_it() -> None:
    tally = Tally()
    tally.send("a", Share(100, 7))
    assert (tally.requests, tally.tokens, tally.pages) == (1, 100, 7)
    tally.heartbeat()
    assert (tally.requests, tally.tokens, tally.pages) == (1, 100, 7), "the instance had not taken it yet"
    tally.take("a")
    tally.heartbeat()
    assert (tally.requests, tally.tokens, tally.pages) == (0, 0, 0)


def test_an_end_counts_negatively_until_the_next_heartbeat() -> None:
    tally = Tally()
    tally.send("a", Share(100, 7))
    tally.take("a")
    tally.heartbeat()
    tally.end("a")
    assert (tally.requests, tally.tokens, tally.pages) == (-1, -100, -7)
    tally.heartbeat()
    assert (tally.requests, tally.tokens, tally.pages) == (0, 0, 0)


def test_what_ends_before_any_heartbeat_leaves_nothing() -> None:
    tally = Tally()
    tally.send("a", Share(100, 7))
    tally.take("a")
    tally.end("a")
    tally.end("a")
    tally.take("a")
    assert (tally.requests, tally.tokens, tally.pages, tally.attempts) == (0, 0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(["send", "take", "end", "heartbeat"]), st.integers(0, 5)), max_size=60))
def test_when_all_is_over_and_heard_of_nothing_counts(steps: list[tuple[str, int]]) -> None:
    tally = Tally()
    sent: set[str] = set()
    for step, number in steps:
        attempt = f"a{number}"
        if step == "send" and attempt not in sent:
            tally.send(attempt, Share(number, number))
            sent.add(attempt)
        elif step == "take":
            tally.take(attempt)
        elif step == "end":
            tally.end(attempt)
        elif step == "heartbeat":
            tally.heartbeat()
    for attempt in sent:
        tally.end(attempt)
    tally.heartbeat()
    assert (tally.requests, tally.tokens, tally.pages, tally.attempts) == (0, 0, 0, 0)


class AgainstAnInstance(RuleBasedStateMachine):
    """An instance that truly runs what it was given: heartbeat plus tally is never off by what is not on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.next = 0
        self.on_the_way: set[str] = set()
        self.runs: set[str] = set()
        self.announced = 0

    @rule()
    def send(self) -> None:
        attempt = f"a{self.next}"
        self.next += 1
        self.on_the_way.add(attempt)
        self.tally.send(attempt, Share(1, 1))

    @rule()
    def accept(self) -> None:
        if self.on_the_way:
            attempt = min(self.on_the_way)
            self.on_the_way.remove(attempt)
            self.runs.add(attempt)
            self.tally.take(attempt)

    @rule()
    def end(self) -> None:
        if self.runs:
            attempt = min(self.runs)
            self.runs.remove(attempt)
            self.tally.end(attempt)

    @rule()
    def heartbeat(self) -> None:
        self.announced = len(self.runs)
        self.tally.heartbeat()

    @invariant()
    def predicted_is_what_runs_and_what_is_on_its_way(self) -> None:
        assert self.announced + self.tally.requests == len(self.runs) + len(self.on_the_way)


TestAgainstAnInstance = AgainstAnInstance.TestCase
