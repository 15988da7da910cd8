"""Exactly once, or an error: whatever arrives, in whatever order, a listener has each token once or hears of the loss."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router import dispatch
from services.router.attempts import Attempt, AttemptTable
from services.router.dispatch import Pair
from services.router.registry import Instance
from shared.messages import Emit, EmitBatch, InstanceRef, StreamStatus, Timing, TokenLogprob
from tests.fake_mesh import announcement

ROUTER = InstanceRef("r", 1)


class Ear:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scores: list[TokenLogprob] = []
        self.ends = 0

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        assert tokens
        self.tokens += tokens

    def on_prompt(self, logprobs: list[TokenLogprob]) -> None:
        self.scores += logprobs

    def on_end(self) -> None:
        self.ends += 1


def pair(decoder: str = "d0", prefiller: str | None = "p0") -> Pair:
    return Pair(
        Instance(announcement("decode", decoder, 1), 0.0),
        None if prefiller is None else Instance(announcement("prefill", prefiller, 2), 0.0),
    )


def attempt(at: Pair | None = None) -> tuple[Attempt, Ear]:
    ear = Ear()
    return Attempt(at or pair(), ear, 0.0), ear


def emit(index: int, *tokens: int, attempt: str = "", **fields: object) -> Emit:
    return Emit(attempt=attempt, index=index, tokens=list(tokens), **fields)  # type: ignore[arg-type]


def test_ids_are_minted_and_never_the_same() -> None:
    ids = {attempt()[0].id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 32 and int(i, 16) >= 0 for i in ids)


def test_tokens_come_once_and_the_end_after_them() -> None:
    made, ear = attempt()
    made.take(emit(0, 1, 2), 0.0)
    made.take(emit(2, 3, finish="stop"), 0.0)
    assert (ear.tokens, ear.ends, made.finish, made.settled) == ([1, 2, 3], 1, "stop", True)


def test_what_is_here_is_dropped_and_what_is_new_of_it_is_kept() -> None:
    made, ear = attempt()
    made.take(emit(0, 1, 2), 0.0)
    made.take(emit(0, 1, 2), 0.0)
    made.take(emit(1, 2, 3), 0.0)
    assert ear.tokens == [1, 2, 3]


def test_a_gap_fails_it_and_nothing_after_the_gap_is_heard() -> None:
    made, ear = attempt()
    made.take(emit(0, 1), 0.0)
    made.take(emit(3, 4), 0.0)
    made.take(emit(1, 2, 3, 4), 0.0)
    assert made.failure is not None
    assert "2 token(s) were lost" in str(made.failure)
    assert made.failure.retryable
    assert (ear.tokens, ear.ends, made.settled) == ([1], 1, False)


def test_a_lost_last_message_is_a_gap_too() -> None:
    made, _ = attempt()
    made.take(emit(0, 1), 0.0)
    made.take(emit(2, finish="stop"), 0.0)
    assert made.finish is None
    assert made.failure is not None


def test_a_decoders_error_is_told_as_it_was_said() -> None:
    made, _ = attempt()
    made.take(emit(0, error="prefill: p0 is gone"), 0.0)
    assert made.failure is not None
    assert (made.failure.stage, str(made.failure)) == ("prefill", "prefill: p0 is gone")
    assert made.settled
    other, _ = attempt()
    other.take(emit(0, error="odd: thing", retryable=False), 0.0)
    assert other.failure is not None
    assert (other.failure.stage, str(other.failure), other.failure.retryable) == ("decode", "decode: odd: thing", False)


def test_tokens_before_an_error_are_heard() -> None:
    made, ear = attempt()
    made.take(emit(0, 1, 2, error="decode step: broke"), 0.0)
    assert (ear.tokens, ear.ends) == ([1, 2], 1)


def test_a_status_in_order_with_the_tokens_shows_a_loss() -> None:
    made, _ = attempt()
    made.take(emit(0, 1), 0.0)
    made.check(1, 1.0)
    assert made.failure is None
    made.check(3, 2.0)
    assert made.failure is not None
    assert "2 token(s)" in str(made.failure)


def test_a_status_that_was_sent_before_admission_is_forgiven_once() -> None:
    made, _ = attempt()
    made.check(None, 0.0)
    assert made.failure is None, "not accepted yet"
    made.accept(0.0)
    made.check(None, 0.1)
    assert made.failure is None
    made.check(None, 1.1)
    assert made.failure is not None


def test_once_listed_it_must_be_in_every_status() -> None:
    made, _ = attempt()
    made.accept(0.0)
    made.check(0, 0.5)
    made.check(None, 1.5)
    assert made.failure is not None


def test_the_first_end_counts() -> None:
    made, ear = attempt()
    made.take(emit(0, 1, finish="length"), 0.0)
    made.take(emit(1, error="late"), 0.0)
    made.check(None, 9.0)
    assert (made.finish, made.failure, ear.ends) == ("length", None, 1)


def test_pairs_are_accounted_as_it_goes() -> None:
    at = pair()
    made, _ = attempt(at)
    dispatch.reserve(at, made.id, 50, 1)
    made.accept(0.0)
    at.decoder.tally.heartbeat()
    assert at.decoder.tally.requests == 0
    assert at.prefiller is not None
    made.take(emit(0, 1), 0.0)
    assert at.prefiller.tally.requests == 0, "with the first token the prefiller is done"


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=30))
def test_whatever_arrives_is_a_prefix_of_the_truth(arrivals: list[tuple[int, int]]) -> None:
    truth = list(range(100, 120))
    made, ear = attempt()
    for index, count in arrivals:
        made.take(emit(index, *truth[index : index + count]), 0.0)
        assert ear.tokens == truth[: len(ear.tokens)]
        assert made.received == len(ear.tokens)
    assert ear.ends == (made.failure is not None)


@given(st.lists(st.integers(1, 4), max_size=8), st.data())
def test_any_loss_on_the_way_is_noticed(sizes: list[int], data: st.DataObject) -> None:
    """Messages arrive in order and some do not: the answer is complete, or it failed."""
    emits, index = [], 0
    for size in sizes:
        emits.append(emit(index, *range(index, index + size)))
        index += size
    emits.append(emit(index, finish="stop"))
    arrived = [e for e in emits if data.draw(st.booleans())]
    made, ear = attempt()
    for e in arrived:
        made.take(e, 0.0)
    made.check(None, 1.0)
    made.check(None, 2.0)
    if made.finish is not None:
        assert ear.tokens == list(range(index))
    elif made.accepted:
        assert made.failure is not None


class TestTable:
    def add(self, table: AttemptTable, at: Pair) -> tuple[Attempt, Ear]:
        made, ear = attempt(at)
        table.add(made)
        return made, ear

    def batch(self, decoder: InstanceRef, *emits: Emit) -> EmitBatch:
        return EmitBatch(decoder=decoder, router=ROUTER, emits=list(emits))

    def test_a_batch_reaches_each_attempt(self) -> None:
        table, at = AttemptTable(), pair()
        (a, ear_a), (b, ear_b) = self.add(table, at), self.add(table, at)
        timing = Timing(admitted_to_ready_s=0.1, first_step_s=0.1, transferred_bytes=5)
        emits = emit(0, 1, attempt=a.id, timing=timing), emit(0, 2, attempt=b.id)
        table.on_batch(self.batch(at.decoder.ref, *emits), 0.0)
        assert (ear_a.tokens, ear_b.tokens, a.timing) == ([1], [2], timing)

    def test_late_and_foreign_messages_are_counted_and_ignored(self) -> None:
        table, at = AttemptTable(), pair()
        made, ear = self.add(table, at)
        table.on_batch(self.batch(InstanceRef("d0", 99), emit(0, 1, attempt=made.id)), 0.0)
        table.remove(made)
        table.remove(made)
        table.on_batch(self.batch(at.decoder.ref, emit(0, 1, attempt=made.id)), 0.0)
        assert (ear.tokens, table.late, len(table)) == ([], 2, 0)

    def test_a_lost_decoder_fails_its_attempts_and_no_other(self) -> None:
        table = AttemptTable()
        here, there = self.add(table, pair("d0"))[0], self.add(table, pair("d1"))[0]
        table.on_lost(InstanceRef("d0", 1), "was restarted")
        assert str(here.failure) == "decode: the decode instance d0 was restarted"
        assert there.failure is None

    def test_a_lost_prefiller_fails_only_what_has_no_token_yet(self) -> None:
        table, at = AttemptTable(), pair()
        waiting, streaming = self.add(table, at)[0], self.add(table, at)[0]
        streaming.take(emit(0, 1), 0.0)
        table.on_lost(InstanceRef("p0", 2), "has left")
        assert str(waiting.failure) == "prefill: the prefill instance p0 has left"
        assert streaming.failure is None

    def test_a_status_is_for_the_attempts_of_its_decoder_only(self) -> None:
        table, at, other = AttemptTable(), pair(), pair("d1")
        here, there = self.add(table, at)[0], self.add(table, other)[0]
        here.take(emit(0, 1), 0.0)
        there.take(emit(0, 1), 0.0)
        table.on_status(StreamStatus(decoder=at.decoder.ref, router=ROUTER, emitted={}), 1.0)
        assert here.failure is not None
        assert there.failure is None

    def test_silence_fails_what_was_accepted(self) -> None:
        table, at = AttemptTable(), pair()
        accepted, asked = self.add(table, at)[0], self.add(table, at)[0]
        accepted.accept(0.0)
        table.sweep(3.9, 4.0)
        assert accepted.failure is None
        table.pardon(3.9)
        table.sweep(7.0, 4.0)
        assert accepted.failure is None
        table.sweep(8.0, 4.0)
        assert accepted.failure is not None
        assert asked.failure is None, "the request itself waits for the answer, and has its own deadline"


def scored(index: int, count: int) -> Emit:
    return emit(0, scores=[TokenLogprob(-float(index + i), []) for i in range(count)], scored=index)


def test_a_prompts_scores_come_once_and_before_its_first_token() -> None:
    ear = Ear()
    at = Attempt(pair(), ear, 0.0, scores=5)
    for message in (scored(0, 3), scored(0, 3), scored(2, 3), emit(0, 7, finish="length")):
        at.take(message, 1.0)
    assert [one.logprob for one in ear.scores] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert (at.failure, at.finish, ear.tokens) == (None, "length", [7])


def test_lost_scores_fail_the_attempt() -> None:
    for messages in (
        [scored(1, 2)],
        [scored(0, 2), scored(3, 2)],
        [scored(0, 4), emit(0, 7)],
        [emit(0, finish="length")],
    ):
        ear = Ear()
        at = Attempt(pair(), ear, 0.0, scores=5)
        for message in messages:
            at.take(message, 1.0)
        assert at.failure is not None
        assert "log-probabilities" in at.failure.reason
        assert at.failure.retryable
        assert ear.tokens == []
