"""What a run found, and how it is shown."""

from __future__ import annotations

from collections import Counter

import msgspec

MOST_REASONS = 12
WHY_WIDTH = 150


class Finding(msgspec.Struct, frozen=True):
    """A wrong or hung answer, or a page that is lost, with the faults shortly before it."""

    at_s: float
    """Since the start of the faults."""
    kind: str
    what: str
    faults: list[str]


class Tally(msgspec.Struct):
    """`verdicts` count requests by verdict; `retried` are those that were answered by a second attempt or a later one."""

    seconds: float = 0.0
    seed: int = 0
    network: bool = False
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    verdicts: Counter[str] = msgspec.field(default_factory=Counter)
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    retried: int = 0
    left: int = 0
    preempted: int = 0
    """As far as the decoders' last starts know."""
    pages_lost: int = 0
    shm_left: list[str] = []
    ended: list[str] = []
    """Parts that ended without a fault that would explain it."""
    findings: list[Finding] = []

    @property
    def good(self) -> bool:
        """Whether what must be zero is."""
        return not (self.verdicts["wrong"] or self.verdicts["hung"] or self.pages_lost)


def table(tally: Tally) -> str:
    """Markdown, and below it what was wrong."""
    rows = [("faults injected", sum(tally.faults.values()))]
    rows += [(f"- {kind}", count) for kind, count in sorted(tally.faults.items())]
    rows += [(f"requests {kind}", tally.verdicts[kind]) for kind in ("right", "refused", "failed")]
    rows += [("of the right ones: retried", tally.retried), ("of the right ones: the client left", tally.left)]
    rows += [("preemptions seen", tally.preempted), ("parts that ended unasked", len(tally.ended))]
    rows += [("/dev/shm entries left", len(tally.shm_left))]
    rows += [("**wrong**", tally.verdicts["wrong"]), ("**hung**", tally.verdicts["hung"])]
    rows += [("**pages lost**", tally.pages_lost)]
    lines = [f"{tally.seconds:.0f} s, seed {tally.seed}", "", "| what | count |", "| --- | --- |"]
    lines += [f"| {what} | {count} |" for what, count in rows]
    if not tally.network:
        lines += ["", "Network faults are left out: they need root and `ip netns`."]
    lines += [
        f"\n{finding.kind} at {finding.at_s:.1f} s: {finding.what}\n  after " + "; ".join(finding.faults)
        for finding in tally.findings
    ]
    lines += ["", "Why refused or failed:"]
    lines += [f"{count:>6}  {why[:WHY_WIDTH]}" for why, count in tally.reasons.most_common(MOST_REASONS)]
    lines += [f"\nended unasked: {end}" for end in tally.ended]
    return "\n".join(lines)
