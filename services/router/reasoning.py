"""What a model thinks before it answers, told from the answer as the text comes. Nothing depends on how it is cut."""

from __future__ import annotations

from typing import Literal

from services.router.dialects import THINK, THOUGHT

Begins = Literal["open", "maybe", "closed"]
"""How an output begins: within a thought that the prompt has opened; perhaps with one; or without."""

_BLANKS = " \t\n\r"


def begins(prompt: str) -> Begins:
    """After this prompt, as the template has rendered it."""
    end = prompt.rstrip(_BLANKS)
    if end.endswith(THINK):
        return "open"
    return "closed" if end.endswith(THOUGHT) else "maybe"


class Thoughts:
    """Splits one output. Blanks around the thought belong to neither side."""

    def __init__(self, begins: Begins) -> None:
        self.thinking = begins == "open"
        """What comes is thought."""
        self._at_start = begins != "closed"
        self._after_marker = self.thinking
        """Blanks that follow are dropped."""
        self._held = ""

    @property
    def undecided(self) -> bool:
        """All that came so far may be the beginning of a thought."""
        return self._at_start

    def feed(self, text: str) -> tuple[str, str]:
        """The thought and the answer that are certain now."""
        self._held += text
        if self._at_start and not self._begin():
            return "", ""
        return self._split() if self.thinking else ("", self._answer())

    def flush(self) -> tuple[str, str]:
        """The rest, once no text follows."""
        held, self._held = self._held, ""
        if self._after_marker:
            held = held.lstrip(_BLANKS)
        return (held.rstrip(_BLANKS), "") if self.thinking else ("", held)

    def _begin(self) -> bool:
        """Whether it is certain how the output begins. A marker that the prompt has already is passed over."""
        rest = self._held.lstrip(_BLANKS)
        if len(rest) < len(THINK) and THINK.startswith(rest):
            return False
        self._at_start = False
        if rest.startswith(THINK):
            self._held = rest[len(THINK) :]
            self.thinking = True
        self._after_marker = self.thinking
        return True

    def _split(self) -> tuple[str, str]:
        if self._after_marker:
            self._held = self._held.lstrip(_BLANKS)
            self._after_marker = not self._held
        thought, marker, rest = self._held.partition(THOUGHT)
        if marker:
            self.thinking, self._after_marker = False, True
            self._held = rest
            return thought.rstrip(_BLANKS), self._answer()
        sure = len(thought)
        for length in range(min(len(THOUGHT) - 1, sure), 0, -1):
            if THOUGHT.startswith(thought[sure - length :]):
                sure -= length
                break
        given = thought[:sure].rstrip(_BLANKS)
        self._held = thought[len(given) :]
        return given, ""

    def _answer(self) -> str:
        held, self._held = self._held, ""
        if self._after_marker:
            held = held.lstrip(_BLANKS)
            self._after_marker = not held
        return held
