"""Log-probabilities in OpenAI's two forms: chat's list of objects, completions' parallel lists."""

from __future__ import annotations

from typing import Any

from services.router.detokenize import Vocabulary
from services.router.validate import Job
from shared.messages import TokenLogprob


class Logprobs:
    """Those of one output's tokens, from their arrival until they go out with the next piece of text."""

    __slots__ = ("_chat", "_length", "_pending", "_vocabulary", "_wanted")

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self._wanted = job.sampling.logprobs
        self._chat = job.kind == "chat"
        self._vocabulary = vocabulary
        self._pending: list[tuple[int, TokenLogprob]] = []
        self._length = 0

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
        """`top_logprobs` always has the token itself, so one more than was asked for where it is not among the likeliest."""
        spelled = [self._vocabulary.spelled(token)[0] for token, _ in pending]
        offsets = []
        for token, _ in pending:
            offsets.append(self._length)
            self._length += len(self._vocabulary.spelled(token)[1].decode("utf-8", "replace"))
        tops = [
            {self._vocabulary.spelled(i)[0]: p for i, p in (*known.top, (token, known.logprob))}
            for token, known in pending
        ]
        return {
            "tokens": spelled,
            "token_logprobs": [known.logprob for _, known in pending],
            "top_logprobs": tops if self._wanted else None,
            "text_offset": offsets,
        }
