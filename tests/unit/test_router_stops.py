"""Stop strings across token boundaries: the cut never depends on how the text was split, and nothing is held for long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.stops import StopStrings


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reads one character after another, and cuts where the text so far ends with a stop string."""
    for end in range(1, len(text) + 1):
        matches = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(matches)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stop_strings = StopStrings(stops)
    out = [stop_strings.feed(piece) for piece in pieces] + [stop_strings.flush()]
    return "".join(out), stop_strings.found


few = st.text(alphabet="abc", max_size=12)


@given(st.lists(few, max_size=8), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4))
def test_any_split_is_cut_where_the_first_stop_string_is_complete(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == reference("".join(pieces), stops)


@given(st.lists(few, max_size=8), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_is_held_could_always_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    given_in = given_out = ""
    for piece in pieces:
        given_in += piece
        given_out += stop_strings.feed(piece)
        if stop_strings.found:
            return
        held = given_in[len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stops_text_passes_at_once() -> None:
    assert run(["a", "b"], []) == ("ab", False)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["Hello\n", "\nUser:"], ["\n\nUser:"], "Hello"),
        (["a", "b", "c"], ["abc"], ""),
        (["ab", "cab"], ["bca"], "a"),
        (["aab"], ["ab"], "a"),
        (["xEN", "Dy"], ["END", "E"], "x"),
        (["abcdef"], ["abcdef", "cd"], "ab"),
        (["ab", "cd", "ef"], ["abcdef", "cd"], "ab"),
    ],
)
def test_cuts(pieces: list[str], stops: list[str], text: str) -> None:
    assert run(pieces, stops) == (text, True)


def test_nothing_follows_a_stop_string() -> None:
    stop_strings = StopStrings(["."])
    assert stop_strings.feed("one. two") == "one"
    assert stop_strings.feed("three") == ""
    assert stop_strings.flush() == ""


def test_a_false_beginning_is_released() -> None:
    stop_strings = StopStrings(["\n\n"])
    assert stop_strings.feed("a\n") == "a"
    assert stop_strings.feed("b") == "\nb"
    assert stop_strings.feed("\n") == ""
    assert stop_strings.flush() == "\n"


def test_a_stop_string_that_is_kept_ends_the_text() -> None:
    for pieces in (["one END two"], ["one E", "ND two"], ["one ", "E", "N", "D", " two"]):
        stops = StopStrings(["END"], keep=True)
        assert "".join(stops.feed(piece) for piece in pieces) + stops.flush() == "one END"
        assert stops.found
