"""What a request does to its logits before a token is drawn: biases, penalties, tokens that cannot come. Row by row, so that a
row depends on no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.messages import Sampling
from shared.models.attention import BatchRow

NEVER = np.float32(-1e30)
"""The logit of a token that cannot be drawn: no bias or penalty comes near it, and softmax makes it zero."""

OUTSIDE = np.float32(-2e30)
"""The logit of a token that the row's mask does not have: drawn even less than one that is only forbidden, so that where all
that the mask has is forbidden, one of it is drawn all the same."""


def adjust(logits: npt.NDArray[np.float32], row: BatchRow, drafts: Sequence[int] = (), *, masked: bool = True) -> None:
    """`logits` `[vocab]` of one place of a row, in place; `drafts` are the row's drafts before that place, which are history like
    the rest. The rules are those of `messages.Sampling`. `masked` False: for a place after the row's own, of which its mask
    knows nothing; what is proposed there is held against the grammar before it is verified. Raises `ValueError` for a token
    that the vocabulary does not have."""
    sampling = row.sample
    assert sampling is not None, "a row that draws"
    if sampling.logit_bias:
        tokens = _tokens(list(sampling.logit_bias), logits.size, "logit_bias")
        logits[tokens] += np.fromiter(sampling.logit_bias.values(), np.float32, len(tokens))
    if sampling.looks_back:
        history = np.concatenate([np.frombuffer(row.history, "<i4"), np.array(drafts, np.int32)])
        _penalise(logits, sampling, history, row.prompt_tokens)
    if row.forbidden:
        logits[_tokens(row.forbidden, logits.size, "forbidden")] = NEVER
    if row.mask and masked:
        keep_masked(logits, row.mask, len(drafts))


def keep_masked(logits: npt.NDArray[np.float32], mask: bytes, position: int = 0) -> None:
    """Of `logits` `[vocab]` only what mask number `position` of `mask` has can be drawn."""
    size = -(-logits.size // 32) * 4
    if len(mask) % size or not 0 <= position * size < len(mask):
        raise ValueError(f"mask: {len(mask)} bytes, {size} are wanted for each position that draws a token")
    own = np.frombuffer(mask, np.uint8, size, position * size)
    within = np.unpackbits(own, count=logits.size, bitorder="little").view(np.bool_)
    if np.count_nonzero(within) * 2 > logits.size:
        logits[np.flatnonzero(~within)] = OUTSIDE
        return
    few = np.flatnonzero(within)
    kept = logits[few]
    logits.fill(OUTSIDE)
    logits[few] = kept


def _penalise(
    logits: npt.NDArray[np.float32], sampling: Sampling, history: npt.NDArray[np.int32], prompt_tokens: int
) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(history)
        had, penalty = logits[seen], np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(had > 0, had / penalty, had * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        output, times = np.unique(history[prompt_tokens:], return_counts=True)
        logits[output] -= times.astype(np.float32) * np.float32(sampling.frequency_penalty)
        logits[output] -= np.float32(sampling.presence_penalty)


def _tokens(tokens: list[int], vocab: int, what: str) -> npt.NDArray[np.int64]:
    found = np.array(tokens, np.int64)
    if found.size and (found.min() < 0 or found.max() >= vocab):
        raise ValueError(f"{what}: a token outside of 0 .. {vocab - 1}")
    return found
