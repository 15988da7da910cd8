"""What the chaos run takes for right, refused, failed, wrong and hung; and what it draws."""

from __future__ import annotations

import random

import msgspec
import pytest

from loadtest.chaos.client import _error_of, _hear
from loadtest.chaos.faults import Fault, Incident, draw_fault
from loadtest.chaos.network import Loopback
from loadtest.chaos.parts import NAMES
from loadtest.chaos.reference import Case
from loadtest.chaos.tally import Finding, Tally, table
from loadtest.chaos.verdict import Heard, judge

CASE = Case(0, [5, 6], 3, [7, 8, 9], "abc")
RIGHT = Heard(status=200, tokens=[7, 8, 9], text="abc", finish="length", done=1)


def verdict(*, router_hurt: bool = False, **changes):
    return judge(CASE, msgspec.structs.replace(RIGHT, **changes), router_hurt=router_hurt).kind


def test_a_whole_answer_is_right():
    assert verdict() == "right"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [7, 8, 8]},
        {"text": "abd"},
        {"tokens": [7, 8]},
        {"text": "ab"},
        {"tokens": [7, 8, 9, 9]},
        {"finish": "stop"},
        {"finish": None},
        {"done": 0},
        {"done": 2},
        {"after_end": True},
        {"error": "it failed"},
        {"broken": "reset"},
    ],
)
def test_a_200_that_is_not_all_of_it_is_wrong(changes):
    assert verdict(**changes) == "wrong"


def test_what_a_client_got_before_it_left_must_begin_the_reference():
    assert verdict(left=True, tokens=[7], text="a", done=0, finish=None) == "right"
    assert verdict(left=True, tokens=[], text="", done=0, finish=None, status=None) == "right"
    assert verdict(left=True, tokens=[8], text="b", done=0) == "wrong"


def test_an_error_event_after_a_beginning_is_clear():
    assert verdict(error="it failed", tokens=[7], text="a", done=0, finish=None) == "failed"
    assert verdict(error="it failed", tokens=[8], text="a", done=0, finish=None) == "wrong"


def test_a_broken_connection_is_clear_only_where_the_router_was_hurt():
    nothing = {"status": None, "tokens": [], "text": "", "done": 0, "finish": None, "broken": "refused"}
    assert verdict(**nothing, router_hurt=True) == "failed"
    assert verdict(**nothing, router_hurt=False) == "wrong"


def test_an_error_before_the_first_byte_has_a_status_a_shape_and_where_it_helps_a_time():
    nothing = {"tokens": [], "text": "", "done": 0, "finish": None}
    assert verdict(**nothing, status=429, error="full", retry_after=True) == "refused"
    assert verdict(**nothing, status=503, error="away", retry_after=True) == "refused"
    assert verdict(**nothing, status=503, error="away", retry_after=False) == "wrong"
    assert verdict(**nothing, status=504, error="late") == "failed"
    assert verdict(**nothing, status=500, error=None) == "wrong"
    assert verdict(**nothing, status=400, error="no such thing") == "wrong", "our requests are good ones"


def test_no_end_is_hung():
    assert verdict(timed_out=True, done=0) == "hung"


def test_a_stream_is_heard_line_by_line():
    heard = Heard(status=200)
    for token, text in ((7, "a"), (8, "b")):
        choice = {"index": 0, "text": text, "token_ids": [token], "finish_reason": None}
        _hear(b"data: " + msgspec.json.encode({"choices": [choice]}), heard)
    _hear(b"", heard)
    last = {"index": 0, "text": "c", "token_ids": [9], "finish_reason": "length"}
    _hear(b"data: " + msgspec.json.encode({"choices": [last]}), heard)
    _hear(b"data: [DONE]", heard)
    assert heard == RIGHT
    _hear(b"data: [DONE]", heard)
    assert (heard.done, heard.after_end) == (2, True)


def test_an_error_has_openais_shape_or_counts_as_none():
    shaped = {"error": {"message": "full", "type": "t", "param": None, "code": None}}
    assert _error_of(msgspec.json.encode(shaped)) == "full"
    for other in (b"", b"oops", b"[]", b"{}", b'{"error": "full"}', b'{"error": {"message": "full"}}'):
        assert _error_of(other) is None


def test_the_same_seed_draws_the_same_faults_and_every_kind_comes():
    cuts = ("link down", "all packets lost")
    first, second = ([draw_fault(draw, NAMES, cuts) for _ in range(200)] for draw in map(random.Random, (3, 3)))
    assert first == second
    assert {fault.kind for fault in first} == {"kill -9", "freeze", "SIGTERM", "storm of cancels", *cuts}
    assert {fault.kind for fault in (draw_fault(random.Random(n), NAMES, Loopback.cuts) for n in range(99))} == {
        "kill -9",
        "freeze",
        "SIGTERM",
        "storm of cancels",
    }


def test_an_incident_touches_what_ran_while_it_lasted_or_shortly_after():
    incident = Incident(Fault("freeze", "router", 1.0), 10.0)
    assert incident.touches(0.0, 10.0)
    assert not incident.touches(0.0, 9.9)
    assert incident.touches(50.0, 60.0), "it lasts still"
    incident.end = 12.0
    assert incident.touches(12.9, 20.0)
    assert not incident.touches(13.1, 20.0)


def test_only_wrong_hung_and_lost_are_bad_and_the_table_says_all():
    tally = Tally(seconds=12.0, seed=3)
    tally.faults["kill -9: router"] = 2
    tally.verdicts.update({"right": 7, "refused": 2, "failed": 1})
    assert tally.good
    assert "| requests right | 7 |" in table(tally)
    assert "| - kill -9: router | 2 |" in table(tally)
    assert "Network faults are left out" in table(tally)
    for kind in ("wrong", "hung"):
        assert not Tally(verdicts=type(tally.verdicts)({kind: 1})).good
    lost = Tally(pages_lost=1, findings=[Finding(1.0, "lost", "decode-1 still holds 1 pages", ["freeze of decode-1"])])
    assert not lost.good
    assert "freeze of decode-1" in table(lost)
