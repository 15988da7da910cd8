"""Where an attempt's tokens become an answer: collected whole, or streamed as server-sent events. Both are a relay's
`Consumer`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from services.router.attempts import Attempt
from services.router.calls import Piece
from services.router.chunks import Chunks, Reason, choice_of, whole
from services.router.detokenize import Vocabulary
from services.router.logprobs import Logprobs, joined
from services.router.output import Output
from services.router.speech import Message, Speech
from services.router.validate import Job
from shared.messages import FinishReason, TokenLogprob
from shared.web import sse
from shared.web.sse import EventStream

_BACKLOG_BYTES = 64 << 10
"""A client that leaves this much unread is slow: its tokens are kept as tokens until it reads. It is also where aiohttp's
transport pauses, so that `drain` then waits."""


OpenStream = Callable[[Attempt, bytes], Awaitable[EventStream]]


def hear(output: Output, speech: Speech, tokens: list[int]) -> list[Piece]:
    """What these tokens add to a message."""
    pieces: list[Piece] = []
    for token in tokens:
        if not speech.stopped:
            pieces += speech.feed(output.feed([token]), 1)
    return pieces


def reason_of(output: Output, speech: Speech | None, finish: FinishReason | None) -> Reason:
    """Why the choice ended."""
    reason = output.reason(finish)
    if speech is None or not speech.has_calls:
        return reason
    return "tool_calls" if reason == "stop" or speech.stopped else reason


class WholeAnswer:
    """Collects one choice; nothing is sent before the end, so that every failure can still be retried."""

    begun = False

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self.job, self._vocabulary = job, vocabulary
        self.reset()

    def reset(self) -> None:
        self._output = Output(self.job, self._vocabulary)
        self._logprobs = Logprobs(self.job, self._vocabulary)
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._speech = None if self.job.manners is None else Speech(self.job.manners)
        self._message = Message()

    @property
    def stopped(self) -> bool:
        return self._output.stopped or (self._speech is not None and self._speech.stopped)

    @property
    def tokens(self) -> int:
        """Of the output so far."""
        return self._output.tokens

    @property
    def reasoning_tokens(self) -> int | None:
        return None if self._speech is None else self._speech.reasoning_tokens

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> bool:
        if self.stopped:
            return True
        before = self._output.tokens
        if self._speech is None:
            self._pieces.append(self._output.feed(tokens))
        else:
            self._message.add(hear(self._output, self._speech, tokens))
        taken = self._output.tokens - before
        self._logprobs.feed(tokens[:taken], logprobs)
        if self.job.return_token_ids:
            self._tokens += tokens[:taken]
        return self.stopped

    def on_prompt(self, logprobs: list[TokenLogprob]) -> None:
        self._logprobs.feed_prompt(logprobs)

    async def advance(self, attempt: Attempt) -> None:
        """Nothing waits here."""

    def choice(self, attempt: Attempt) -> dict[str, Any]:
        """As the answer has it, once the attempt has run to its end."""
        self._pieces.append(self._output.flush())
        text, speech = "".join(self._pieces), self._speech
        logprobs = joined(self._logprobs.prompt(), self._logprobs.take())
        said: str | dict[str, Any] = ("" if self.job.echo is None else self.job.echo.text) + text
        if speech is not None:
            self._message.add(speech.flush(text))
            said = self._message.body()
        reason = reason_of(self._output, speech, attempt.finish)
        return choice_of(self.job, said, reason, self._tokens, logprobs)


def body_of(answers: Sequence[WholeAnswer], attempts: Sequence[Attempt]) -> bytes:
    """The answer of all choices, once their attempts have run to their ends."""
    choices = [answer.choice(attempt) for answer, attempt in zip(answers, attempts, strict=True)]
    thoughts = total(answer.reasoning_tokens for answer in answers)
    return whole([answer.job for answer in answers], choices, sum(answer.tokens for answer in answers), thoughts)


def total(counts: Iterable[int | None]) -> int | None:
    """None where all are."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class Stream:
    """The one event stream of all choices: opened, by `open_stream`, with the first text of whichever has it first, ended with
    the last word of whichever ends last."""

    def __init__(self, jobs: Sequence[Job], open_stream: OpenStream) -> None:
        self._jobs, self._open = jobs, open_stream
        self._opening = asyncio.Lock()
        self._running = len(jobs)
        self._tokens = 0
        self._reasoning_tokens: int | None = None
        self.events: EventStream | None = None

    async def begin(self, attempt: Attempt, first: bytes) -> EventStream:
        """With the first events of a choice."""
        async with self._opening:
            if self.events is None:
                self.events = await self._open(attempt, first)
            else:
                self.events.send(first)
            return self.events

    async def end(self, chunks: Chunks, last: bytes, tokens: int) -> None:
        """With the last events of a choice of `tokens` tokens. After the last choice's come the usage, where it was asked for,
        and `[DONE]`, which nothing follows."""
        assert self.events is not None, "a finished attempt has been advanced"
        self._running -= 1
        self._tokens += tokens
        self._reasoning_tokens = total((self._reasoning_tokens, chunks.reasoning_tokens))
        if self._running:
            self.events.send(last)
        else:
            await self.events.close(last + chunks.usage(self._jobs, self._tokens, self._reasoning_tokens) + sse.DONE)

    async def fail(self, error: msgspec.Struct) -> None:
        """The stream has begun, so the error is an event, and no `[DONE]` follows it."""
        assert self.events is not None, "before the first byte an error is a status"
        await self.events.close(sse.error(msgspec.json.encode(error)))


class StreamedAnswer:
    """Writes every token of one choice in the turn in which it comes."""

    def __init__(self, job: Job, vocabulary: Vocabulary, stream: Stream) -> None:
        self._job, self._vocabulary, self.stream = job, vocabulary, stream
        self._chunks = Chunks(job)
        self._events: EventStream | None = None
        self.reset()

    def reset(self) -> None:
        self._output = Output(self._job, self._vocabulary)
        self._logprobs = Logprobs(self._job, self._vocabulary)
        self._speech = None if self._job.manners is None else Speech(self._job.manners)
        self._waiting: list[int] = []
        self._unsent: list[int] = []

    @property
    def begun(self) -> bool:
        return self._events is not None

    @property
    def stopped(self) -> bool:
        return self._output.stopped or (self._speech is not None and self._speech.stopped)

    @property
    def tokens(self) -> int:
        """Of the output so far."""
        return self._output.tokens

    def on_tokens(self, tokens: list[int], logprobs: list[TokenLogprob]) -> bool:
        if self.stopped:
            return True
        self._logprobs.feed(tokens, logprobs)
        events = self._events
        if events is None or self._waiting or events.backlog > _BACKLOG_BYTES:
            self._waiting += tokens
            return True
        events.send(self._event(tokens))
        return self.stopped

    def on_prompt(self, logprobs: list[TokenLogprob]) -> None:
        self._logprobs.feed_prompt(logprobs)

    async def advance(self, attempt: Attempt) -> None:
        if self._events is None:
            first = self._chunks.first(self._logprobs.prompt()) + self._event(self._take_waiting())
            self._events = await self.stream.begin(attempt, first)
        while self._waiting:
            if self._events.backlog > _BACKLOG_BYTES:
                await self._events.drain()
            self._events.send(self._event(self._take_waiting()))

    async def finish(self, attempt: Attempt) -> None:
        """The last text and the reason; with the last of all choices the end of the stream."""
        reason = reason_of(self._output, self._speech, attempt.finish)
        rest, text = b"", self._output.flush()
        if self._speech is not None:
            pieces, text = self._speech.flush(text), ""
            self._chunks.reasoning_tokens = self._speech.reasoning_tokens
            rest = self._chunks.pieces(pieces, [], self._output.tokens, None)
        last = rest + self._chunks.last(text, self._take_unsent(), reason, self._output.tokens, self._logprobs.take())
        await self.stream.end(self._chunks, last, self._output.tokens)

    def _event(self, tokens: list[int]) -> bytes:
        """The event for these tokens; empty where their text is not certain yet."""
        before = self._output.tokens
        pieces: list[Piece] = []
        text = ""
        if self._speech is None:
            text = self._output.feed(tokens)
        else:
            pieces = hear(self._output, self._speech, tokens)
        taken = self._output.tokens - before
        self._logprobs.drop(len(tokens) - taken)
        if self._job.return_token_ids:
            self._unsent += tokens[:taken]
        if self._speech is not None:
            return self._pieces(pieces, self._speech)
        if not text:
            return b""
        return self._chunks.text(text, self._take_unsent(), self._output.tokens, self._logprobs.take())

    def _pieces(self, pieces: list[Piece], speech: Speech) -> bytes:
        if not pieces:
            return b""
        self._chunks.reasoning_tokens = speech.reasoning_tokens
        return self._chunks.pieces(pieces, self._take_unsent(), self._output.tokens, self._logprobs.take())

    def _take_waiting(self) -> list[int]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _take_unsent(self) -> list[int]:
        unsent, self._unsent = self._unsent, []
        return unsent
