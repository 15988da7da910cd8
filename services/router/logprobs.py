"""Log-probabilities in OpenAI's two forms: chat's list of objects, completions' parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.detokenize import Vocabulary
from services.router.validate import Job
from shared.messages import TokenLogprob


class Logprobs:
    """Those of one output's tokens, from their arrival until they go out with the next piece of text; before them those of
    the prompt, where it is echoed."""

    __slots__ = ("_chat", "_echo", "_length", "_pending", "_prompt", "_text", "_vocabulary", "_wanted")

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self._wanted = job.sampling.logprobs
        self._chat = job.kind == "chat"
        self._vocabulary = vocabulary
        self._pending: list[tuple[int, TokenLogprob]] = []
        self._echo = job.echo
        self._prompt: list[TokenLogprob] = []
        self._text = vocabulary.detokenizer(keep_special=job.keep_special)
        self._length = 0 if job.echo is None else len(job.echo.text)

    def drop(self, count: int) -> None:
        """The last ones, of tokens that are not part of the output."""
        if self._wanted is not None and count:
            del self._pending[-count:]

    def feed_prompt(self, logprobs: list[TokenLogprob]) -> None:
        """The next of the prompt's tokens but the first, which follows nothing."""
        self._prompt += logprobs

    def prompt(self) -> dict[str, Any] | None:
        """Those of the prompt, as completions have them."""
        if self._echo is None or self._wanted is None:
            return None
        tokens = self._echo.tokens
        known: list[TokenLogprob | None] = [None, *self._prompt]
        return self._lists(list(zip(tokens, known, strict=True)), self._echo.starts)

    def feed(self, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        """One for each token: the attempt has seen to that."""
        if self._wanted is not None:
            self._pending += zip(tokens, logprobs, strict=False)

    def take(self) -> dict[str, Any] | None:
        """What has come since the last time, as a choice's `logprobs`; None where nothing was asked for."""
        if self._wanted is None:
            return None
        pending, self._pending = self._pending, []
        return self._as_chat(pending) if self._chat else self._as_completion(pending)

    def _as_chat(self, pending: list[tuple[int, TokenLogprob]]) -> dict[str, Any]:
        content = [
            {**self._named(token, known.logprob), "top_logprobs": [self._named(*one) for one in known.top]}
            for token, known in pending
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._vocabulary.spelled(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    def _as_completion(self, pending: list[tuple[int, TokenLogprob]]) -> dict[str, Any]:
        """A token begins where the text ends that is certain before it."""
        starts = []
        for token, _ in pending:
            starts.append(self._length)
            self._length += len(self._text.feed([token]))
        return self._lists(pending, starts)

    def _lists(self, pending: Sequence[tuple[int, TokenLogprob | None]], starts: list[int]) -> dict[str, Any]:
        """`top_logprobs` always has the token itself, so one more than was asked for where it is not among the likeliest."""
        tops = [
            None
            if known is None
            else {self._vocabulary.spelled(i)[0]: p for i, p in (*known.top, (token, known.logprob))}
            for token, known in pending
        ]
        return {
            "tokens": [self._vocabulary.spelled(token)[0] for token, _ in pending],
            "token_logprobs": [None if known is None else known.logprob for _, known in pending],
            "top_logprobs": tops if self._wanted else None,
            "text_offset": starts,
        }


def joined(first: dict[str, Any] | None, then: dict[str, Any] | None) -> dict[str, Any] | None:
    """Completions' parallel lists, one after the other."""
    if first is None or then is None:
        return then
    return {name: None if values is None else values + then[name] for name, values in first.items()}
