"""What one attempt has produced so far: its tokens as text, cut at a stop string. No I/O."""

from __future__ import annotations

from services.router.detokenize import Vocabulary
from services.router.stops import StopStrings
from services.router.validate import Job
from shared.messages import FinishReason


class Output:
    """The text of one choice as it grows."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "tokens")

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        shown = job.manners.shown if job.manners is not None else frozenset()
        self._detokenizer = vocabulary.detokenizer(shown, keep_special=job.keep_special)
        self._stops = StopStrings(job.stops, keep=job.keep_stop)
        self._min_tokens = job.sampling.min_tokens if job.stops else 0
        self.tokens = 0
        """Tokens in; all that were generated, whether their text is out or not."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete: what comes after it is not part of the output."""
        return self._stops.found

    def feed(self, tokens: list[int]) -> str:
        """The text that can go out now."""
        free = tokens[: max(0, self._min_tokens - self.tokens)]
        self.tokens += len(tokens)
        early = self._detokenizer.feed(free) if free else ""  # a stop string does not count before `min_tokens`
        return early + self._stops.feed(self._detokenizer.feed(tokens[len(free) :]))

    def flush(self) -> str:
        """The rest, after the last token."""
        return self._stops.feed(self._detokenizer.flush()) + self._stops.flush()

    def reason(self, finish: FinishReason | None) -> FinishReason:
        """Why it ended: as the decoder said, unless a stop string was found."""
        return "stop" if self.stopped or finish is None else finish
