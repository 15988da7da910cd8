"""The page pool and its ledger: every page is in exactly one state, and the sum is the pool's size, at all times.

    free ──reserve──▶ reserved ──▶ in_transit ──▶ running ──▶ free
                          │             │
                          └──────▶ quarantined ──▶ free        (a write may still land: see `shared.messenger.receiver`)

Pure bookkeeping: no memory is touched here. Pages are held by an owner, an attempt's id; an owner's pages keep their order,
which is the order of the request's tokens.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, get_args

PageState = Literal["free", "cached", "reserved", "in_transit", "running", "quarantined"]
HeldState = Literal["cached", "reserved", "in_transit", "running", "quarantined"]

STATES: tuple[PageState, ...] = get_args(PageState)


class PagePool:
    """`num_pages` pages, numbered from 0. Freed pages go to the end of the queue, so that a page rests as long as can be."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._state: list[PageState] = ["free"] * num_pages
        self._held: dict[str, list[int]] = {}
        self._counts: dict[PageState, int] = dict.fromkeys(STATES, 0)
        self._counts["free"] = num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    def counts(self) -> dict[PageState, int]:
        """Pages in each state; the values sum to `num_pages`."""
        return dict(self._counts)

    def pages(self, owner: str) -> list[int]:
        """The owner's pages in order; empty where it holds none. The list is the pool's own: do not change it."""
        return self._held.get(owner, [])

    def owners(self) -> list[str]:
        return list(self._held)

    def reserve(self, owner: str, count: int, state: HeldState = "reserved") -> list[int] | None:
        """`count` more pages for `owner`, in `state`; None, with nothing taken, where fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._set(page, state)
        self._held.setdefault(owner, []).extend(taken)
        return taken

    def mark(self, owner: str, state: HeldState, first: int = 0, last: int | None = None) -> None:
        """Moves the owner's pages `[first:last]`, by position in its list, to `state`."""
        for page in self._held.get(owner, [])[first:last]:
            self._set(page, state)

    def trim(self, owner: str, keep: int) -> int:
        """The owner's pages after the first `keep` become free; how many there were."""
        held = self._held.get(owner, [])
        for page in (given := held[keep:]):
            self._set(page, "free")
            self._free.append(page)
        del held[keep:]
        return len(given)

    def release(self, owner: str) -> int:
        """All pages of `owner` become free; how many there were. Idempotent: 0 for an unknown owner."""
        pages = self._held.pop(owner, [])
        for page in pages:
            self._set(page, "free")
            self._free.append(page)
        return len(pages)

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the ledger does not balance. Tests call it after every step."""
        held = [page for pages in self._held.values() for page in pages]
        assert len(held) == len(set(held)), "a page is held twice"
        assert not set(held) & set(self._free), "a page is both held and free"
        assert sorted([*held, *self._free]) == list(range(self.num_pages)), "pages are lost"
        assert all(self._state[page] == "free" for page in self._free), "a free page has another state"
        assert all(self._state[page] != "free" for page in held), "a held page is marked free"
        assert self._counts == {s: self._state.count(s) for s in STATES}, "the counts are off"
        assert sum(self._counts.values()) == self.num_pages, "the sum is not the pool's size"

    def _set(self, page: int, state: PageState) -> None:
        self._counts[self._state[page]] -= 1
        self._counts[state] += 1
        self._state[page] = state
