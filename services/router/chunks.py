"""Answers in OpenAI's JSON. A stream's chunks differ in a few bytes only, so the rest is encoded once a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from services.router.calls import Piece
from services.router.openai_types import CompletionTokensDetails, PromptTokensDetails, Usage
from services.router.speech import delta
from services.router.validate import Job

_json = msgspec.json.Encoder().encode


Reason = Literal["stop", "length", "tool_calls"]

CACHED = PromptTokensDetails(cached_tokens=0)
"""There is no prefix cache: every prompt is computed whole."""


def usage_of(jobs: Sequence[Job], completion_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    """`completion_tokens` over all of `jobs`, choices of one request, of which `reasoning_tokens` were thoughts (None: they were
    not read for them); a prompt that several have counts once."""
    prompt = sum(len(job.tokens) for job in jobs if not job.repeats_prompt)
    return _usage(prompt, completion_tokens, reasoning_tokens)


def _usage(prompt_tokens: int, completion_tokens: int, reasoning_tokens: int | None) -> Usage:
    details = None if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, CACHED, details)


def choice_of(
    job: Job,
    said: str | dict[str, Any],
    reason: Reason,
    token_ids: list[int],
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One choice of an answer that is not streamed. `said`: its text, or its message."""
    chat = job.kind == "chat"
    message = {"role": "assistant", "content": said, "refusal": None} if isinstance(said, str) else said
    content: dict[str, Any] = {"message": message} if chat else {"text": said}
    choice = {"index": job.index, **content, "logprobs": logprobs, "finish_reason": reason}
    if job.return_token_ids:
        choice["token_ids"] = token_ids
        if not chat:
            choice["prompt_token_ids"] = job.tokens
    return choice


def whole(
    jobs: Sequence[Job], choices: list[dict[str, Any]], completion_tokens: int, reasoning_tokens: int | None = None
) -> bytes:
    """The body of an answer that is not streamed. Tokens are those of all choices."""
    job = jobs[0]
    chat = job.kind == "chat"
    body: dict[str, Any] = {
        "id": job.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.fingerprint,
        "choices": choices,
        "usage": usage_of(jobs, completion_tokens, reasoning_tokens),
    }
    if job.return_token_ids and chat:
        body["prompt_token_ids"] = job.tokens
    return _json(body)


class Chunks:
    """The events of one choice of a stream."""

    __slots__ = ("_chat", "_head", "_index", "_job", "_prompt_ids", "_tail", "reasoning_tokens")

    def __init__(self, job: Job) -> None:
        self._job = job
        self._chat = chat = job.kind == "chat"
        kind = "chat.completion.chunk" if chat else "text_completion"
        shared = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._head = b"data: " + _json({**shared, "system_fingerprint": job.fingerprint})[:-1] + b',"choices":['
        self._index = job.index
        self._tail = b',"usage":null}\n\n' if job.include_usage else b"}\n\n"
        self._prompt_ids = job.return_token_ids
        self.reasoning_tokens: int | None = None
        """So far; None: the output is not read for thoughts."""

    def first(self, logprobs: dict[str, Any] | None = None) -> bytes:
        """What comes before the output: the role (chat), or the prompt where it is echoed, with its `logprobs`."""
        if self._chat:
            content = b'""' if self._job.manners is None else b"null"
            return self._chunk(b'"delta":{"role":"assistant","content":' + content + b"}", [], b"null", 0, None)
        return self.text(self._job.echo.text, [], 0, logprobs) if self._job.echo is not None else b""

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
        """The rest of the text, and the reason."""
        rest = self.text(text, [], completion_tokens) if text and self._chat else b""
        piece = b'"delta":{}' if self._chat else b'"text":' + _json(text)
        return rest + self._chunk(piece, token_ids, b'"' + reason.encode() + b'"', completion_tokens, logprobs)

    def usage(self, jobs: Sequence[Job], completion_tokens: int, reasoning_tokens: int | None = None) -> bytes:
        """The chunk that follows all choices, where it was asked for."""
        if not self._job.include_usage:
            return b""
        usage = usage_of(jobs, completion_tokens, reasoning_tokens)
        return self._head + b'],"usage":' + _json(usage) + b"}\n\n"

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
            usage = _json(_usage(len(self._job.tokens), completion_tokens, self.reasoning_tokens))
            tail = tail.replace(b'"usage":null', b'"usage":' + usage)
        known = b"null" if logprobs is None else _json(logprobs)
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            head,
            self._index,
            piece,
            known,
            reason,
            ids,
            tail,
        )
