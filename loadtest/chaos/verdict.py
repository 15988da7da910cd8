"""What an answer is worth: right, refused, failed, or wrong. Pure.

| verdict | is |
| --- | --- |
| right | all of the reference; of a client that left: a beginning of it |
| refused | 429 or 503 with Retry-After and an error in OpenAI's shape |
| failed | another clear error: a 5xx in OpenAI's shape; an `error` event after a beginning of the reference; a broken
connection while the router itself was hurt |
| wrong | anything else |
| hung | no end within the request's deadline and a margin |
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadtest.chaos.reference import Case

Kind = Literal["right", "refused", "failed", "wrong", "hung"]

CLEAR = frozenset({500, 502, 503, 504})


class Heard(msgspec.Struct):
    """All that a client noticed of one answer."""

    status: int | None = None
    """None: no answer began."""
    tokens: list[int] = []
    text: str = ""
    finish: str | None = None
    done: int = 0
    """`[DONE]` lines of a stream; 1 for a whole body."""
    after_end: bool = False
    """Something followed `[DONE]` or the error."""
    error: str | None = None
    """The message of an error in OpenAI's shape."""
    retry_after: bool = False
    broken: str | None = None
    """How the connection broke."""
    left: bool = False
    """The client went away on purpose."""
    timed_out: bool = False
    tries: int | None = None


class Verdict(msgspec.Struct, frozen=True):
    kind: Kind
    why: str = ""


def judge(case: Case, heard: Heard, *, router_hurt: bool) -> Verdict:
    """`router_hurt`: the router was killed, frozen, cut off or told to end while the request ran."""
    if not _begins(case, heard):
        return Verdict("wrong", f"said {heard.tokens} {heard.text!r}, right is {case.tokens} {case.text!r}")
    if heard.after_end:
        return Verdict("wrong", "something followed the end")
    if heard.left:
        return Verdict("right")
    if heard.timed_out:
        return Verdict("hung", f"after status {heard.status} and {len(heard.tokens)} tokens")
    if heard.broken is not None:
        return _broken(heard.broken, router_hurt=router_hurt)
    if heard.status != 200:
        return _error_status(heard)
    return _ok(case, heard)


def _begins(case: Case, heard: Heard) -> bool:
    return case.tokens[: len(heard.tokens)] == heard.tokens and case.text.startswith(heard.text)


def _broken(how: str, *, router_hurt: bool) -> Verdict:
    if router_hurt:
        return Verdict("failed", f"connection: {how}")
    return Verdict("wrong", f"the connection broke while nothing was wrong with the router: {how}")


def _error_status(heard: Heard) -> Verdict:
    if heard.error is None:
        return Verdict("wrong", f"status {heard.status} without an error in OpenAI's shape")
    if heard.status in (429, 503):
        if heard.retry_after:
            return Verdict("refused", f"{heard.status}: {heard.error}")
        return Verdict("wrong", f"status {heard.status} without Retry-After: {heard.error}")
    if heard.status in CLEAR:
        return Verdict("failed", f"{heard.status}: {heard.error}")
    return Verdict("wrong", f"status {heard.status}: {heard.error}")


def _ok(case: Case, heard: Heard) -> Verdict:
    if heard.error is not None:
        if heard.done:
            return Verdict("wrong", f"both [DONE] and an error: {heard.error}")
        return Verdict("failed", f"event: {heard.error}")
    if heard.done != 1:
        return Verdict("wrong", f"status 200 with {heard.done} [DONE] after {len(heard.tokens)} tokens")
    if heard.tokens != case.tokens or heard.text != case.text:
        return Verdict("wrong", f"cut: {len(heard.tokens)} of {len(case.tokens)} tokens, text {heard.text!r}")
    if heard.finish != "length":
        return Verdict("wrong", f"the finish reason is {heard.finish!r}")
    return Verdict("right")
