"""What one attempt has produced so far: its tokens as text, cut at a stop string. No I/O."""

from __future__ import annotations

from services.router.detokenize import Vocabulary
from services.router.stops import StopStrings
from services.router.validate import Job
from shared.messages import FinishReason


class Output:
    """The text of one choice as it grows."""

    __slots__ = ("_cuts", "_detokenizer", "_min_tokens", "_stops", "tokens")

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        shown = job.manners.shown if job.manners is not None else frozenset()
        self._detokenizer = vocabulary.detokenizer(shown, keep_special=job.keep_special)
        self._stops = StopStrings(job.stops, keep=job.keep_stop)
        self._cuts = bool(job.stops)
        self._min_tokens = job.sampling.min_tokens  # a stop string does not count before
        self.tokens = 0
        """Tokens in, whether their text is out or not; none after the one that completed a stop string."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete: what comes after it is not part of the output."""
        return self._stops.found

    def feed(self, tokens: list[int]) -> str:
        """The text that can go out now. However many tokens come at once, those after a stop string are not taken."""
        if not self._cuts:
            self.tokens += len(tokens)
            return self._detokenizer.feed(tokens)
        pieces: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            text = self._detokenizer.feed([token])
            pieces.append(text if self.tokens <= self._min_tokens else self._stops.feed(text))
        return "".join(pieces)

    def flush(self) -> str:
        """The rest, after the last token."""
        return self._stops.feed(self._detokenizer.flush()) + self._stops.flush()

    def reason(self, finish: FinishReason | None) -> FinishReason:
        """Why it ended: as the decoder said, unless a stop string was found."""
        return "stop" if self.stopped or finish is None else finish
