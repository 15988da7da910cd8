"""What this router did to one instance that its last heartbeat cannot know of yet.

A heartbeat is up to half a second old, and a router that trusts it alone sends everything of that half second to the same
place. So every attempt counts from the moment it is sent, until a heartbeat that was sent after the instance had taken it;
one that ends counts negatively until the next heartbeat.
"""

from __future__ import annotations

import msgspec


class Share(msgspec.Struct, frozen=True):
    """What one attempt puts on one instance."""

    tokens: int
    """Prompt tokens to compute (prefill)."""
    pages: int
    """Pages reserved at admission."""


NOTHING = Share(0, 0)


class Tally:
    """Corrections to add to the last heartbeat's load. Each can be negative."""

    __slots__ = ("_sent", "_settled", "_taken", "pages", "requests", "tokens")

    def __init__(self) -> None:
        self._sent: dict[str, Share] = {}
        self._taken: dict[str, Share] = {}
        self._settled: dict[str, Share] = {}
        self.requests = self.tokens = self.pages = 0

    def send(self, attempt: str, share: Share) -> None:
        """The attempt is on its way."""
        self._sent[attempt] = share
        self._add(share, 1)

    def take(self, attempt: str) -> None:
        """The instance has it: the next heartbeat counts it."""
        share = self._sent.pop(attempt, None)
        if share is not None:
            self._taken[attempt] = share

    def end(self, attempt: str) -> None:
        """It is over there, or never began. Idempotent."""
        for held in (self._sent, self._taken, self._settled):
            share = held.pop(attempt, None)
            if share is not None:
                self._add(share, -1)
                return

    def heartbeat(self) -> None:
        """A new load has come: it counts what was taken, and no longer what ended."""
        self._settled |= self._taken
        self._taken.clear()
        self.requests = self.tokens = self.pages = 0
        for share in self._sent.values():
            self._add(share, 1)

    @property
    def on_the_way(self) -> int:
        """Attempts that were sent and not taken yet."""
        return len(self._sent)

    @property
    def attempts(self) -> int:
        """This router's attempts there."""
        return len(self._sent) + len(self._taken) + len(self._settled)

    def _add(self, share: Share, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * share.tokens
        self.pages += sign * share.pages
