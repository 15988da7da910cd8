"""Sliding windows: layers in which a token sees only the last ones (Gemma 3)."""

from __future__ import annotations

import msgspec

from shared.models.fields import Fields
from shared.models.rope import Rope, rope_of


class Window(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int
    """That a token of such a layer sees, itself among them."""
    layers: list[bool]
    """For each layer, whether it has the window; the others see all."""
    rope: Rope
    """Of the layers that have it."""


def read_window(raw: Fields, layers: int) -> Window:
    """Both spellings: `layer_types` or `sliding_window_pattern` p, by which each p-th layer sees all."""
    kinds = raw.values.get("layer_types")
    if kinds is None:
        pattern = raw.positive("sliding_window_pattern", raw.positive("_sliding_window_pattern", 6))
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise raw.refuse("layer_types", kinds, f"sliding_attention or full_attention for each of {layers} layers")
    local = raw.inner("rope_parameters").inner("sliding_attention")
    return Window(
        tokens=raw.positive("sliding_window", 4096),
        layers=[kind == "sliding_attention" for kind in kinds],
        rope=rope_of(local, raw, raw.number("rope_local_base_freq", 10000.0)),
    )


def read_global_rope(raw: Fields) -> Rope:
    """Of the layers that see all."""
    fields = raw.inner("rope_parameters").inner("full_attention")
    values = raw.inner("rope_scaling").values | fields.values
    return rope_of(Fields(values, raw.path), raw, raw.number("rope_theta", 1e6))
