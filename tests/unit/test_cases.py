"""Every kind of fault that users of other systems have reported has a test here that carries its id: `pytest.mark.case`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

CASES = {
    "L1": "an abort while the prefiller is dead: pages are reclaimed once they are fenced",
    "L2": "a client that leaves at any time: both sides hear of it at once",
    "L3": "a refusal before admission costs the prefiller nothing",
    "L4": "an abort is idempotent in every state; late ones are counted",
    "L5": "ids of attempts are minted by the router; duplicates are refused",
    "L6": "no page is reused while an old write can land",
    "L7": "a storm of aborts",
    "L8": "the caller's cancellation at every await",
    "F1": "a failed prefill is the client's error at once",
    "F2": "a failed transfer is never an empty or cut 200",
    "F3": "a restarted instance at the same address",
    "F4": "idle for long, then a request",
    "F5": "no circular wait for pages",
    "F6": "admission counts running, reserved, in transit and quarantined pages",
    "F7": "an address that nobody can reach is named",
    "F8": "connections are pooled per peer",
    "F9": "the broker restarts",
    "C2": "which path a request took, and the same output on each",
    "C3": "a pair that does not fit is refused with both values",
    "A1": "a token is on the wire when it is made",
    "A2": "exactly one [DONE], last",
    "A3": "an early end delivers all that was made",
    "A4": "not ready is 503 with the reason and Retry-After",
    "A5": "usage in streams",
}


def marked() -> set[str]:
    marks = (
        found for path in TESTS.rglob("test_*.py") for found in re.findall(r"mark\.case\(([^)]*)\)", path.read_text())
    )
    return {case for mark in marks for case in re.findall(r'"(\w+)"', mark)}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_a_test(case: str) -> None:
    assert case in marked(), CASES[case]


def test_no_test_names_a_case_that_is_none() -> None:
    assert marked() <= set(CASES)
