"""Tokens out of logits. The draw for position p is a pure function of (seed, p)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.messages import Sampling
from shared.models import _kernels

_SEED_BITS = (1 << 64) - 1


def sample(
    context: _kernels.Context,
    logits: npt.NDArray[np.float32],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
) -> list[int]:
    """One token for each row of `logits` `[rows, vocab]`; `positions[i]` is the position that row i's token will have.

    Kept are the tokens with at least min_p of the likeliest one's probability, of these the top_k likeliest, of these the
    shortest likeliest-first prefix that holds top_p of what is left. Equal logits go to the smaller token. Raises
    `ValueError` where a row's logits are not numbers.
    """
    draws = np.empty((len(samplings), 5), np.float64)
    for draw, sampling, position in zip(draws, samplings, positions, strict=True):
        uniform = _kernels.philox_uniform(sampling.seed & _SEED_BITS, position)
        draw[:] = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k or 0, uniform)
    out = np.empty(len(samplings), np.int32)
    _kernels.sample(context, logits, draws, out)
    tokens: list[int] = out.tolist()
    if min(tokens, default=0) < 0:
        raise ValueError(f"row {tokens.index(-1)} of the sampled rows: its logits are not numbers")
    return tokens
