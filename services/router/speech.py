"""What a model says as a message: thoughts, content, tool calls. Plain text passes by without this."""

from __future__ import annotations

from typing import Any

import msgspec

from services.router.calls import CallParser, Piece
from services.router.dialects import Dialect
from services.router.reasoning import Begins, Thoughts


class Manners(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's output is to be read."""

    thinks: Begins = "closed"
    dialect: Dialect | None = None
    """None: no calls."""
    functions: frozenset[str] = frozenset()
    parallel: bool = True
    reveals: bool = True
    """Thoughts are part of the answer."""
    shown: frozenset[int] = frozenset()
    """Special tokens that have text: the markers."""


class Speech:
    """One output. Fed token by token, for its tokens are counted by what they are."""

    def __init__(self, manners: Manners) -> None:
        self._manners = manners
        self._thoughts = Thoughts(manners.thinks)
        self._calls = None
        if manners.dialect is not None:
            self._calls = CallParser(manners.dialect, manners.functions, parallel=manners.parallel)
        self._undecided = 0
        """Tokens of which it is not certain what they are."""
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Nothing that follows counts."""
        return self._calls is not None and self._calls.stopped

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.calls > 0

    def feed(self, text: str, tokens: int) -> list[Piece]:
        """`text` is what `tokens` tokens have added: none, while it is not certain."""
        before = self._thoughts.thinking
        pieces = self._pieces(*self._thoughts.feed(text))
        self._undecided += tokens
        if self._thoughts.undecided:
            return pieces
        if before or self._thoughts.thinking:
            self.reasoning_tokens += self._undecided
        self._undecided = 0
        return pieces

    def flush(self, text: str = "") -> list[Piece]:
        """The last text, and the rest."""
        pieces = self.feed(text, 0) + self._pieces(*self._thoughts.flush())
        return pieces + (self._calls.flush() if self._calls is not None else [])

    def _pieces(self, thought: str, answer: str) -> list[Piece]:
        pieces = [Piece(reasoning=thought)] if thought and self._manners.reveals else []
        if self._calls is not None:
            return pieces + self._calls.feed(answer)
        return [*pieces, Piece(content=answer)] if answer else pieces


class Message:
    """The pieces of one output together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.content is not None:
                self._content.append(piece.content)
            elif piece.reasoning is not None:
                self._reasoning.append(piece.reasoning)
            elif piece.name is not None:
                function = {"name": piece.name, "arguments": ""}
                self._calls.append({"id": piece.id, "type": "function", "function": function})
            elif piece.arguments is not None:
                assert piece.call is not None, "arguments are of a call"
                self._calls[piece.call]["function"]["arguments"] += piece.arguments

    def body(self) -> dict[str, Any]:
        """As a choice has it. No content where all that was said is thoughts or calls."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            body["reasoning_content"] = reasoning
        if self._calls:
            body["tool_calls"] = self._calls
        if not content and (reasoning or self._calls):
            body["content"] = None
        return body


def delta(piece: Piece) -> dict[str, Any]:
    """As a chunk has it."""
    if piece.content is not None:
        return {"content": piece.content}
    if piece.reasoning is not None:
        return {"reasoning_content": piece.reasoning}
    if piece.name is not None:
        function = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [{"index": piece.call, "id": piece.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.arguments}}]}
