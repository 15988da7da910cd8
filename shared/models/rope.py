"""The rotary embedding that a model asks for; `shared.models.rope_table` has its numbers."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from shared.models.fields import Fields

Scaling = Literal["default", "linear", "llama3", "yarn"]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: frequency i of head_dim / 2 is theta^(-2i / head_dim), then scaled.

    "linear" divides every frequency by `factor`. "llama3" divides the low ones by `factor`, keeps the high ones and
    blends between (Llama 3.1's rule; `low_freq_factor`, `high_freq_factor`, `original_positions`). "yarn" blends by the
    turns that a frequency makes in `original_positions`, kept above `beta_fast` and divided below `beta_slow`, and
    multiplies the table by `table_scale` (arXiv 2309.00071).
    """

    theta: float
    scaling: Scaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN's bounds are whole numbers of frequencies."""
    table_scale: float = 1.0
    score_scale: float = 1.0
    """Of attention scores, on top of the model's own (DeepSeek's mscale_all_dim)."""


def read_rope(raw: Fields, theta: float = 10000.0) -> Rope:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`, which holds both."""
    values = raw.inner("rope_scaling").values | raw.inner("rope_parameters").values
    return rope_of(Fields(values, raw.path), raw, raw.number("rope_theta", theta))


def rope_of(fields: Fields, raw: Fields, theta: float) -> Rope:
    """`fields`: of the rotary embedding; `raw`: of the whole model."""
    theta = fields.number("rope_theta", theta)
    kind = fields.values.get("rope_type") or fields.values.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    factor = fields.number("factor", 1.0)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=factor)
    original = fields.positive("original_max_position_embeddings", raw.positive("max_position_embeddings", 2048))
    if kind == "yarn":
        return _yarn_of(fields, theta, factor, original)
    if kind != "llama3":
        raise raw.refuse("rope_scaling", fields.values, "default, linear, llama3 and yarn")
    return Rope(
        theta=theta,
        scaling="llama3",
        factor=factor,
        low_freq_factor=fields.number("low_freq_factor", 1.0),
        high_freq_factor=fields.number("high_freq_factor", 4.0),
        original_positions=original,
    )


def _yarn_of(fields: Fields, theta: float, factor: float, original: int) -> Rope:
    both = bool(fields.values.get("mscale") and fields.values.get("mscale_all_dim"))
    all_dim = _mscale(factor, fields.number("mscale_all_dim", 1.0)) if fields.values.get("mscale_all_dim") else 1.0
    table = _mscale(factor, fields.number("mscale", 1.0)) / all_dim if both else _mscale(factor, 1.0)
    return Rope(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", default=True),
        table_scale=fields.number("attention_factor", table),
        score_scale=all_dim * all_dim,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
