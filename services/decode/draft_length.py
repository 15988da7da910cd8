"""How many tokens are worth proposing for one sequence: as long as its proposals stand, more; when they fall, as many as stood;
when none stands, none for a while, and twice as long each time (as congestion windows and their back-off, RFC 5681 and 6298)."""

from __future__ import annotations

LONGEST_PAUSE = 16
"""Steps."""


class DraftLength:
    """Of one sequence. Knows what became of its proposals, and nothing else, so that it is as good for any proposer."""

    def __init__(self, most: int) -> None:
        """`most`: the setting. It begins with all of it: most of what is worth proposing for at all stands."""
        self._most = most
        self._length = most
        self._pause = 0
        self._left = 0

    def next(self) -> int:
        """For the next step; 0 while it pauses. Called once a step."""
        if self._left:
            self._left -= 1
            return 0
        return self._length

    def note(self, drafted: int, accepted: int) -> None:
        """A step with some: how many stood."""
        if accepted == drafted:
            self._length = min(self._most, max(self._length, drafted + 1))
        else:
            self._length = max(1, accepted)
        self._pause = 0 if accepted else min(LONGEST_PAUSE, 2 * self._pause + 1)
        self._left = self._pause
