"""Log-probabilities of one row's tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.messages import TokenLogprob


class Distribution:
    """Of logits `[vocab]`, as they are now: what happens to the array later does not matter."""

    def __init__(self, logits: npt.NDArray[np.float32], top: int) -> None:
        """`top`: how many of the likeliest to name; of equal ones the smaller token first."""
        highest = logits.max()
        total = np.exp(logits - highest).sum(dtype=np.float64)
        self._logprobs = logits.astype(np.float64) - (np.float64(highest) + np.log(total))
        self._top = _likeliest(self._logprobs, min(top, logits.size))

    def of(self, token: int) -> TokenLogprob:
        return TokenLogprob(float(self._logprobs[token]), [(i, float(self._logprobs[i])) for i in self._top])


def _likeliest(logprobs: npt.NDArray[np.float64], count: int) -> list[int]:
    if not count:
        return []
    bar = np.partition(logprobs, -count)[-count]
    candidates = np.flatnonzero(logprobs >= bar)
    order = np.lexsort((candidates, -logprobs[candidates]))
    found: list[int] = candidates[order][:count].tolist()
    return found
