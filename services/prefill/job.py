"""One attempt as the prefiller knows it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kv import plan
from shared.messages import Prefill


@dataclass(slots=True, eq=False)
class Job:
    """The KV of the first `done` of its `total` tokens is computed; `total` is one less than the prompt has."""

    prefill: Prefill
    done: int = 0

    @property
    def attempt(self) -> str:
        return self.prefill.attempt

    @property
    def total(self) -> int:
        return plan.prefill_tokens(len(self.prefill.tokens))

    @property
    def left(self) -> int:
        return self.total - self.done
