"""Where a JSON value ends, and what a call's object says, while its text is still coming. Nothing depends on how it is cut."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

_BLANKS = " \t\n\r"


class ValueScanner:
    """One JSON value: brackets and strings are counted, nothing else is checked."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""
        self.done = False

    def feed(self, text: str, at: int) -> int:
        """Where in `text` what belongs to the value ends, from `at` on; `len(text)` while it goes on. A number or a word ends
        before what cannot be part of it."""
        while at < len(text) and not self.done:
            if not self._take(text[at]):
                return at
            at += 1
        return at

    def _take(self, character: str) -> bool:
        """Whether it belongs to the value."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
            self.done = not self._in_string and not self._depth
            return True
        self._kind = self._kind or character
        if self._kind not in '{["':
            self.done = character in _BLANKS + ",}]"
            return not self.done
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.done = not self._depth
        return True


ARGUMENTS = ("arguments", "parameters")


class CallObject:
    """`{"name": ..., "arguments": {...}}` as it comes: `name` as soon as it is known; `take()` gives the text of the arguments
    that came since, verbatim. `done` after the closing brace; `failed` as soon as it can be no call of one of `names`."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.begun = False
        """The arguments have begun, or the object has ended without any."""
        self.done = False
        self.failed = False
        self._expects = "{"
        self._key = ""
        self._raw: list[str] = []
        self._fresh: list[str] = []
        self._value = ValueScanner()

    def take(self) -> str:
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str, at: int) -> int:
        """Where in `text` it stands, from `at` on: at the end, behind the object, or at what makes it fail."""
        while at < len(text) and not self.done and not self.failed:
            if self._expects in ("text", "value", "arguments"):
                at = self._scan(text, at)
            elif text[at] in _BLANKS or self._punctuation(text[at]):
                at += 1
        return at

    def _punctuation(self, character: str) -> bool:
        """Whether it is taken; otherwise it begins what comes next, or makes this fail."""
        expects = self._expects
        if expects == "{" and character == "{":
            self._expects = "key"
        elif expects in ("key", "next") and character == "}":
            self._end()
        elif expects == "next" and character == ",":
            self._expects = "key"
        elif expects == "key" and character == '"':
            self._begin("text")
            return False
        elif expects == ":" and character == ":":
            self._expects = "start"
        elif expects == "start":
            streamed = self._key in ARGUMENTS and character == "{" and not self.begun
            self._begin("arguments" if streamed else "value")
            self.begun = self.begun or streamed
            return False
        else:
            self.failed = True
            return False
        return True

    def _begin(self, kind: str) -> None:
        self._expects, self._value, self._raw = kind, ValueScanner(), []

    def _scan(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        (self._fresh if self._expects == "arguments" else self._raw).append(text[at:end])
        if self._value.done:
            self._finish_value()
        return end

    def _finish_value(self) -> None:
        kind, self._expects = self._expects, "next"
        if kind == "arguments":
            return
        value = _parsed("".join(self._raw))
        if kind == "text":
            self._expects, self._key = ":", value
            self.failed = not isinstance(value, str)
        elif self._key == "name":
            self.name = value
            self.failed = value not in self._names
        elif self._key in ARGUMENTS and not self.begun:
            self.begun = True
            self._fresh.append(value if isinstance(value, str) else "{}")
            self.failed = not isinstance(value, str | None)

    def _end(self) -> None:
        self.done = True
        self.failed = self.name is None
        if not self.begun:
            self.begun = True
            self._fresh.append("{}")


def _parsed(text: str) -> Any:
    """The value; what is no JSON is no text either."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ...
