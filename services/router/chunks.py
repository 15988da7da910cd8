"""Answers in OpenAI's JSON. A stream's chunks differ in a few bytes only, so the rest is encoded once a request."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.router.calls import Piece
from services.router.openai_types import CompletionTokensDetails, Usage
from services.router.speech import delta
from services.router.validate import Job

_json = msgspec.json.Encoder().encode


Reason = Literal["stop", "length", "tool_calls"]


def usage_of(job: Job, completion_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    """`reasoning_tokens` of the completion were thoughts; None: it was not read for them."""
    prompt = len(job.tokens)
    details = None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt, completion_tokens, prompt + completion_tokens, details)


def whole(
    job: Job,
    said: str | dict[str, Any],
    reason: Reason,
    completion_tokens: int,
    token_ids: list[int],
    logprobs: dict[str, Any] | None = None,
    reasoning_tokens: int | None = None,
) -> bytes:
    """The body of an answer that is not streamed. `said`: its text, or its message."""
    chat = job.kind == "chat"
    message = {"role": "assistant", "content": said, "refusal": None} if isinstance(said, str) else said
    content: dict[str, Any] = {"message": message} if chat else {"text": said}
    choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
    body: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": [choice],
        "usage": usage_of(job, completion_tokens, reasoning_tokens),
    }
    if job.return_token_ids:
        choice["token_ids"] = token_ids
        (body if chat else choice)["prompt_token_ids"] = job.tokens
    return _json(body)


class Chunks:
    """The events of one stream."""

    __slots__ = ("_chat", "_head", "_job", "_prompt_ids", "_tail", "_usage", "reasoning_tokens")

    def __init__(self, job: Job) -> None:
        self._job = job
        self._chat = chat = job.kind == "chat"
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = _json({"id": job.id, "object": kind, "created": job.created, "model": job.model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._usage = job.include_usage
        self._tail = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"
        self._prompt_ids = job.return_token_ids
        self.reasoning_tokens: int | None = None
        """So far; None: the output is not read for thoughts."""

    def first(self) -> bytes:
        """What comes before the first text: the role (chat)."""
        if self._chat:
            content = b'""' if self._job.manners is None else b"null"
            return self._chunk(b'"delta":{"role":"assistant","content":' + content + b"}", [], b"null", 0, None)
        return b""

    def text(
        self, text: str, token_ids: list[int], completion_tokens: int, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        """A piece of the output. `completion_tokens` counts all so far, these included."""
        piece = b'"delta":{"content":' + _json(text) + b"}" if self._chat else b'"text":' + _json(text)
        return self._chunk(piece, token_ids, b"null", completion_tokens, logprobs)

    def pieces(
        self, pieces: list[Piece], token_ids: list[int], completion_tokens: int, logprobs: dict[str, Any] | None
    ) -> bytes:
        """New parts of a message, each in a chunk of its own; what else is new goes with the first."""
        chunks = []
        for piece in pieces:
            chunks.append(
                self._chunk(b'"delta":' + _json(delta(piece)), token_ids, b"null", completion_tokens, logprobs)
            )
            token_ids, logprobs = [], None
        return b"".join(chunks)

    def last(
        self,
        text: str,
        token_ids: list[int],
        reason: Reason,
        completion_tokens: int,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        """The rest of the text, the reason, and the usage chunk where it was asked for; not `[DONE]`."""
        rest = self.text(text, [], completion_tokens) if text and self._chat else b""
        piece = b'"delta":{}' if self._chat else b'"text":' + _json(text)
        end = self._chunk(piece, token_ids, b'"' + reason.encode() + b'"', completion_tokens, logprobs)
        return rest + end + (self._usage_chunk(completion_tokens) if self._usage else b"")

    def _usage_chunk(self, completion_tokens: int) -> bytes:
        return (
            self._head + b'],"usage":' + _json(usage_of(self._job, completion_tokens, self.reasoning_tokens)) + b"}\n\n"
        )

    def _chunk(
        self,
        piece: bytes,
        token_ids: list[int],
        reason: bytes,
        completion_tokens: int,
        logprobs: dict[str, Any] | None,
    ) -> bytes:
        head, tail, ids = self._head, self._tail, b""
        if self._job.return_token_ids:
            ids = b',"token_ids":' + _json(token_ids)
            if self._prompt_ids:
                self._prompt_ids = False
                prompt = b',"prompt_token_ids":' + _json(self._job.tokens)
                ids, tail = (ids, prompt + tail) if self._chat else (ids + prompt, tail)
        if self._job.continuous_usage:
            usage = _json(usage_of(self._job, completion_tokens, self.reasoning_tokens))
            tail = tail.replace(b'"usage":null', b'"usage":' + usage)
        known = b"null" if logprobs is None else _json(logprobs)
        return b'%b{"index":0,%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (head, piece, known, reason, ids, tail)
