"""The table of a rotary embedding."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shared.models.config import Rope

Floats = npt.NDArray[np.float32]


def frequencies(rope: Rope, head_dim: int) -> Floats:
    """`[head_dim / 2]` radians a position."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.power(np.float64(rope.theta), exponents.astype(np.float64))).astype(np.float32)
    if rope.scaling == "linear":
        return plain / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(plain, rope)
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


def rope_table(rope: Rope, head_dim: int, positions: int) -> Floats:
    """`[positions, head_dim]`: cosines of head_dim / 2 angles, then their sines."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies(rope, head_dim)[None, :]
    wide = angles.astype(np.float64)
    return np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)
