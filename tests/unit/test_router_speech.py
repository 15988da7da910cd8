"""Thoughts and tool calls in what a model says: told apart, never leaked in part, however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.dialects import DEEPSEEK_V3, DEEPSEEK_V31, DIALECTS, HERMES, LLAMA3_JSON, Dialect
from services.router.reasoning import Begins, begins
from services.router.speech import Manners, Message, Speech

NAMES = frozenset({"weather", "add"})
WEATHER = '{"city": "Pa\\"r}is 東京", "days": [1, {"a": "<tool_call>"}]}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def read(pieces: list[str], dialect: Dialect | None = HERMES, thinks: Begins = "closed", **fields: Any) -> Any:
    """Content, thought, calls as (name, arguments), of a text that comes in these pieces."""
    speech, message = Speech(Manners(thinks=thinks, dialect=dialect, functions=NAMES, **fields)), Message()
    for piece in pieces:
        message.add(speech.feed(piece, 1))
    message.add(speech.flush())
    body = message.body()
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in body.get("tool_calls", [])]
    assert speech.has_calls == bool(calls)
    return body["content"], body.get("reasoning_content"), calls


CASES: dict[str, tuple[Dialect, str, str | None, list[tuple[str, str]]]] = {
    "no call": (HERMES, "Just  text.\n", "Just  text.\n", []),
    "one": (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>',
        None,
        [("weather", WEATHER)],
    ),
    "text before": (
        HERMES,
        'Let me see.\n\n<tool_call>{"name":"add","arguments":{}}</tool_call>\n',
        "Let me see.",
        [("add", "{}")],
    ),
    "two": (
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": [2]}, "name": "add"}\n</tool_call>',
        None,
        [("add", '{"a": 1}'), ("add", '{"a": [2]}')],
    ),
    "text after": (HERMES, '<tool_call>{"name":"add","arguments":{}}</tool_call> done ', " done", [("add", "{}")]),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}</tool_call>', None, [("add", "{}")]),
    "arguments as text": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    "null arguments": (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', None, [("add", "{}")]),
    "parameters": (
        HERMES,
        '<tool_call>{"name": "add", "parameters": {"a": 1}, "id": 7}</tool_call>',
        None,
        [("add", '{"a": 1}')],
    ),
    "no end": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', None, [("add", '{"a": 1')]),
    "end forgotten": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>{"name": "weather", "arguments": {}}}</tool_call>',
        None,
        [("add", "{}"), ("weather", "{}")],
    ),
    "unknown": (
        HERMES,
        'x<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        'x<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "no json": (HERMES, "<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    "twice begun": (HERMES, '<tool_call><tool_call>{"name": "add"}</tool_call>', "<tool_call>", [("add", "{}")]),
    "half a marker": (HERMES, "a <tool_cal", "a <tool_cal", []),
    "half a call": (HERMES, 'a <tool_call>{"name": "ad', 'a <tool_call>{"name": "ad', []),
    "llama": (LLAMA3_JSON, f' {{"name": "weather", "parameters": {WEATHER}}}', None, [("weather", WEATHER)]),
    "llama, tagged": (LLAMA3_JSON, '<|python_tag|>{"name": "add", "parameters": {}}', None, [("add", "{}")]),
    "llama, two": (
        LLAMA3_JSON,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}};',
        None,
        [("add", '{"a": 1}'), ("add", '{"a": 2}')],
    ),
    "llama, text": (LLAMA3_JSON, 'The {"name": "add"}', 'The {"name": "add"}', []),
    "llama, other json": (
        LLAMA3_JSON,
        '{"name": "Bob", "age": 3} {"name": "add"}',
        '{"name": "Bob", "age": 3} {"name": "add"}',
        [],
    ),
    "llama, a list": (LLAMA3_JSON, "[1]", "[1]", []),
    "deepseek v3": (
        DEEPSEEK_V3,
        "Sure.<｜tool▁calls▁begin｜>"
        + V3.format("weather", WEATHER)
        + "\n"
        + V3.format("add", "{}")
        + "<｜tool▁calls▁end｜>",
        "Sure.",
        [("weather", WEATHER), ("add", "{}")],
    ),
    "deepseek v3.1": (
        DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜>" + V31.format("add", "{}") + V31.format("weather", WEATHER) + "<｜tool▁calls▁end｜>",
        None,
        [("add", "{}"), ("weather", WEATHER)],
    ),
    "deepseek, unknown": (DEEPSEEK_V31, V31.format("rm", "{}"), V31.format("rm", "{}"), []),
    "deepseek, no head": (DEEPSEEK_V3, "<｜tool▁call▁begin｜>" + "x" * 400, "<｜tool▁call▁begin｜>" + "x" * 400, []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_read(name: str) -> None:
    dialect, text, content, calls = CASES[name]
    assert read([text], dialect) == (content, None, calls)


@pytest.mark.parametrize("name", CASES)
def test_character_by_character_it_is_the_same(name: str) -> None:
    dialect, text, content, calls = CASES[name]
    assert read(list(text), dialect) == (content, None, calls)


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in itertools.pairwise(at)]


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "add", ',
        '"arguments": {"a": "}"}',
        "}",
        "{",
        '"',
        "\\",
        "\n",
        " ",
        "add",
        "x",
    ),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "function",
        "\n```json\n",
        "<｜tool▁calls▁begin｜>",
    ),
    *(
        "<think>",
        "</think>",
        "<thi",
        "</th",
        "<tool_",
        "<|python_tag|>",
        ";",
        '{"name": "add", "parameters": {}}',
        "null",
        "7",
    ),
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 500), max_size=12),
    st.sampled_from([None, *DIALECTS.values()]),
    st.sampled_from(["open", "maybe", "closed"]),
    st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_any_cutting_gives_the_same(
    text: str, places: list[int], dialect: Dialect | None, thinks: Begins, parallel: bool
) -> None:
    whole = read([text], dialect, thinks, parallel=parallel)
    assert read(cut(text, places), dialect, thinks, parallel=parallel) == whole
    assert read(list(text), dialect, thinks, parallel=parallel) == whole


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_call_is_given_out_as_content_on_the_way(name: str) -> None:
    dialect, text, content, _ = CASES[name]
    speech, said = Speech(Manners(dialect=dialect, functions=NAMES)), ""
    for character in text:
        said += "".join(piece.content or "" for piece in speech.feed(character, 1))
        assert (content or "").startswith(said)


def test_arguments_come_as_they_are_written() -> None:
    speech = Speech(Manners(dialect=HERMES, functions=NAMES))
    pieces = [
        piece for c in f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}' for piece in speech.feed(c, 1)
    ]
    assert pieces[0].name == "weather"
    assert pieces[0].id is not None
    assert [piece.arguments for piece in pieces[1:]] == list(WEATHER)
    assert json.loads(WEATHER)


def test_one_call_only_where_no_more_are_wanted() -> None:
    text = '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "weather"}</tool_call> and more'
    assert read([text], parallel=False) == (None, None, [("add", "{}")])
    speech = Speech(Manners(dialect=HERMES, functions=NAMES, parallel=False))
    assert [speech.feed(c, 1) and speech.stopped for c in text].count(True) == 1
    assert speech.stopped


@pytest.mark.parametrize(
    ("thinks", "text", "content", "thought"),
    [
        ("open", "\nI see.\n</think>\n\nYes. ", "Yes. ", "I see."),
        ("open", "<think>\nI see.</think>Yes", "Yes", "I see."),
        ("open", "never  ends\n", None, "never  ends"),
        ("open", "</think>\n\nYes", "Yes", None),
        ("maybe", "<think>\nI  <b>see</b>.\n</think>\n\nYes", "Yes", "I  <b>see</b>."),
        ("maybe", " Yes <think>no</think>", " Yes <think>no</think>", None),
        ("maybe", "<thi", "<thi", None),
        ("closed", "<think>a</think>", "<think>a</think>", None),
    ],
)
def test_thoughts(thinks: Begins, text: str, content: str | None, thought: str | None) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces, None, thinks) == (content, thought, [])


def test_thoughts_that_are_not_to_be_shown_are_left_out_and_calls_come_after_them() -> None:
    text = '<think>x <tool_call>{"name": "add"}</tool_call></think>\n<tool_call>{"name": "weather"}</tool_call>'
    assert read([text], HERMES, "maybe", reveals=False) == (None, None, [("weather", "{}")])


def test_tokens_of_thoughts_are_counted() -> None:
    speech = Speech(Manners(thinks="maybe"))
    for piece in ("<think>", "a", "b", "</think>", "c"):
        speech.feed(piece, 1)
    assert speech.reasoning_tokens == 4


def test_how_an_output_begins_is_seen_in_the_prompt() -> None:
    assert begins("<|assistant|><think>\n") == "open"
    assert begins("<|assistant|><think>\n\n</think>\n\n") == "closed"
    assert begins("<think>x</think> y <|assistant|>") == "maybe"
