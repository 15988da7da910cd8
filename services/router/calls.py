"""Tool calls in what a model says, found as the text comes. No part of a marker is ever given out as content before it is
certain to be none, and what is found does not depend on how the text was cut."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Protocol

import msgspec

from services.router.dialects import Dialect
from services.router.json_scan import CallObject, ValueScanner

_LONGEST_HEAD = 256
"""Characters in which a head must end, or it is none."""

_BLANKS = " \t\n\r"
_BETWEEN = _BLANKS + ";,"
"""Between calls that have no markers."""


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of a message: one of these, and of a call its number always."""

    content: str | None = None
    reasoning: str | None = None
    call: int | None = None
    id: str | None = None
    name: str | None = None
    """With `id`, once a call: it begins."""
    arguments: str | None = None


class _Body(Protocol):
    """One call between its markers: see `CallObject`."""

    name: str | None
    begun: bool
    done: bool
    failed: bool

    def feed(self, text: str, at: int) -> int: ...
    def take(self) -> str: ...


class HeadedCall:
    """A head with the name, then arguments."""

    def __init__(self, head: tuple[str, str], names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.begun = False
        self.done = False
        self.failed = False
        self._before, self._after = head
        self._head = ""
        self._fresh: list[str] = []
        self._value = ValueScanner()

    def take(self) -> str:
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not self.done and not self.failed:
            if self.name is None:
                self._read_head(text[at])
                at += 1
            elif not self.begun and text[at] != "{":
                self._head += text[at]
                self.failed = len(self._head) > _LONGEST_HEAD
                at += 1
            else:
                self.begun = True
                end = self._value.feed(text, at)
                self._fresh.append(text[at:end])
                self.done = self._value.done
                at = end
        return at

    def _read_head(self, character: str) -> None:
        self._head += character
        start = self._head.find(self._before) if self._before else 0
        if start >= 0 and self._head.endswith(self._after) and len(self._head) > start + len(self._before):
            name = self._head[start + len(self._before) : -len(self._after)].strip()
            self.name = name or None
            self.failed = name not in self._names
        self.failed = self.failed or len(self._head) > _LONGEST_HEAD


class CallParser:
    """The calls in one output; other text is content. What looks like a call and is none, or calls a function that is not in
    `names`, is content as it stands. Blanks around calls are dropped."""

    def __init__(self, dialect: Dialect, names: Collection[str], *, parallel: bool) -> None:
        self._dialect, self._names, self._parallel = dialect, names, parallel
        self._buffer = ""
        self._body: _Body | None = None
        self._raw = ""
        """Of the body, until it is certain to be a call."""
        self._blank = ""
        self._started = False
        self._closing = False
        self._bare = not dialect.begin
        """A call may begin without a marker."""
        self.calls = 0
        """That have begun."""

    @property
    def stopped(self) -> bool:
        """A call is complete and another one is not wanted."""
        return self.calls > 0 and not self._parallel and self._body is None

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while not self.stopped and self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The rest, once no text follows."""
        pieces: list[Piece] = []
        if self.stopped or self._closing:
            return pieces
        if self._bare and self.calls:
            self._buffer = self._buffer.lstrip(_BETWEEN)
        if self._body is None or not self._started:
            self._say(self._raw + self._buffer, pieces)
        if self._blank and not self.calls:
            pieces.append(Piece(content=self._blank))
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """One thing that is certain. False: more text is needed."""
        if not self._buffer:
            return False
        if self._body is not None:
            return self._read_body(self._body, pieces)
        if self._closing:
            return self._close()
        return self._begin_bare(pieces) if self._bare else self._find(pieces)

    def _find(self, pieces: list[Piece]) -> bool:
        """The next marker."""
        dialect = self._dialect
        wanted = [dialect.begin, *dialect.noise] if dialect.begin else []
        at, marker = _first(self._buffer, wanted)
        if marker is None:
            sure = len(self._buffer) - _could_begin(self._buffer, wanted)
            self._say(self._buffer[:sure], pieces)
            self._buffer = self._buffer[sure:]
            return False
        self._say(self._buffer[:at], pieces)
        self._buffer = self._buffer[at + len(marker) :]
        if marker == dialect.begin:
            self._open(marker)
        return True

    def _begin_bare(self, pieces: list[Piece]) -> bool:
        """Where the output begins, and after each call: another one, or no more of them."""
        rest = self._buffer.lstrip(_BETWEEN if self.calls else _BLANKS)
        for marker in self._dialect.noise:
            if rest.startswith(marker):
                self._buffer = rest[len(marker) :]
                return True
        if not rest or any(marker.startswith(rest) for marker in self._dialect.noise):
            return False
        self._bare = False
        if rest.startswith("{"):
            skipped_text = self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            self._open(skipped_text)
        return True

    def _open(self, raw: str) -> None:
        head = self._dialect.head
        self._body = CallObject(self._names) if head is None else HeadedCall(head, self._names)
        self._raw, self._started = raw, False

    def _read_body(self, body: _Body, pieces: list[Piece]) -> bool:
        end = body.feed(self._buffer, 0)
        if not self._started:
            self._raw += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if body.failed and not self._started:
            return self._is_none(pieces)
        if body.begun and body.name is not None:
            self._give(body, pieces)
        if body.done or body.failed:
            self._body, self._blank = None, ""
            self._bare, self._closing = not self._dialect.begin, bool(self._dialect.close)
        return bool(self._buffer)

    def _is_none(self, pieces: list[Piece]) -> bool:
        raw, self._body, self._raw = self._raw, None, ""
        self._say(raw, pieces)
        return True

    def _give(self, body: _Body, pieces: list[Piece]) -> None:
        if not self._started:
            self._started, self._raw, self._blank = True, "", ""
            pieces.append(Piece(call=self.calls, id="call_" + secrets.token_hex(12), name=body.name))
            self.calls += 1
        if fresh := body.take():
            pieces.append(Piece(call=self.calls - 1, arguments=fresh))

    def _close(self) -> bool:
        """What stands before the end of a call says nothing; another one may begin without it."""
        ends = [self._dialect.close, self._dialect.begin]
        at, marker = _first(self._buffer, ends)
        if marker is None:
            self._buffer = self._buffer[len(self._buffer) - _could_begin(self._buffer, ends) :]
            return False
        self._closing = False
        self._buffer = self._buffer[at + (len(marker) if marker == self._dialect.close else 0) :]
        return True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Content; blanks at its end wait for what follows them."""
        whole = self._blank + text
        said = whole.rstrip(_BLANKS)
        self._blank = whole[len(said) :]
        if said:
            pieces.append(Piece(content=said))


def _first(text: str, markers: list[str]) -> tuple[int, str | None]:
    """Where the earliest of `markers` begins, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(0, None))


def _could_begin(text: str, markers: list[str]) -> int:
    """Length of the longest end of `text` with which one of `markers` begins."""
    longest = max((len(marker) for marker in markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
