"""Stop strings, found across token boundaries. Text that could be the beginning of one is held back, and no more than that."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until the first of `stops` is complete. No stops: everything passes at once."""

    __slots__ = ("_held", "_keep", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string that is found stays in the text."""
        self._stops, self._keep = tuple(stops), keep
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What of the text so far can go out now. Once `found`, what precedes the stop string, and then nothing more.

        Of several stop strings the one that is complete first cuts (of those, the longest), so that the cut does not
        depend on how the text was split. Text after it is dropped.
        """
        if self.found:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        complete = [(at + len(stop), at) for stop in self._stops if (at := whole.find(stop)) >= 0]
        if complete:
            self.found = True
            self._held = ""
            end, start = min(complete)
            return whole[: end if self._keep else start]
        keep = self._could_begin(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
