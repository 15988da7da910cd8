"""The table of a rotary embedding."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shared.models.rope import Rope

Floats = npt.NDArray[np.float32]


def frequencies(rope: Rope, head_dim: int) -> Floats:
    """`[head_dim / 2]` radians a position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.power(np.float64(rope.theta), exponents.astype(np.float64))).astype(np.float32)
    if rope.scaling == "linear":
        return plain / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(plain, rope)
    if rope.scaling == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Floats, rope: Rope) -> Floats:
    """Wavelengths over original_positions / low_freq_factor are stretched by `factor`, those under original_positions /
    high_freq_factor are kept, those between are blended by where they lie."""
    wavelength = 2 * math.pi / plain
    share = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    share = np.clip(share, 0.0, 1.0)
    blended: Floats = ((1 - share) * plain / rope.factor + share * plain).astype(np.float32)
    return blended


def _yarn(plain: Floats, rope: Rope, head_dim: int) -> Floats:
    low, high = (_frequency_with(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretched = np.clip((np.arange(plain.size) - low) / ((high - low) or 0.001), 0.0, 1.0)
    blended: Floats = (plain / rope.factor * stretched + plain * (1.0 - stretched)).astype(np.float32)
    return blended


def _frequency_with(turns: float, rope: Rope, head_dim: int) -> float:
    """The index of the frequency that makes so many turns in the original positions."""
    return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rope_table(rope: Rope, head_dim: int, positions: int) -> Floats:
    """`[positions, head_dim]`: cosines of head_dim / 2 angles, then their sines, times `table_scale`."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies(rope, head_dim)[None, :]
    wide = angles.astype(np.float64)
    return (np.concatenate([np.cos(wide), np.sin(wide)], axis=1) * rope.table_scale).astype(np.float32)
