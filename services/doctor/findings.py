"""What the doctor found: one line each, and the exit status that they come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]
Value = str | float | int | bool | None


class Finding(msgspec.Struct, frozen=True):
    """`what` was looked at, by a short name; `text` says in one line how it is, and for `warn` and `fail` what to do. `numbers`:
    what was measured, by a name that ends in the unit; None: not measured."""

    level: Level
    what: str
    text: str
    numbers: Mapping[str, Value] = {}


def exit_status(findings: Sequence[Finding]) -> int:
    """1 where anything failed. A warning is no failure: the mesh works, though not as well as it could."""
    return int(any(finding.level == "fail" for finding in findings))


def as_text(findings: Sequence[Finding]) -> str:
    """A line each, and one that counts them."""
    width = max((len(finding.what) for finding in findings), default=0)
    lines = [f"{f.level:<4}  {f.what:<{width}}  {' '.join(f.text.split())}" for f in findings]
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    return "\n".join([*lines, ", ".join(f"{count} {level}" for level, count in counts.items())])


def as_json(findings: Sequence[Finding]) -> str:
    """{"status": the exit status, "findings": [...]}."""
    return msgspec.json.encode({"status": exit_status(findings), "findings": list(findings)}).decode()
