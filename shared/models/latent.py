"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): its sizes, and the absorbed form that runs here.

A token's keys and values of all heads are made of one latent c and one rotated part r: head h's key is (K_h c, r) and its
value V_h c. So q_h . k_h = (K_h^T q_h) . c + q'_h . r, and the output is V_h applied to the weighted sum of latents. Queries
are taken to the latents (absorbed) instead of latents to every head: the cache holds (c, r) once, as one head's key, whose
first numbers are also its value. It runs so in prefill and decode alike, because only then does no bit of a result depend
on how a prompt was cut.
"""

from __future__ import annotations

import msgspec

from shared.models.fields import Fields

LATENT_NORM_EPS = 1e-6
"""Of the norms of low rank forms, whatever the model's other norms have."""


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    q_rank: int | None
    """Of the queries' own low rank form; None: one matrix."""
    rank: int
    """Of c."""
    plain_dim: int
    """Of a head's query and key before r."""
    rotated_dim: int
    """Of r."""
    value_dim: int
    """Of a head's value."""
    interleaved: bool
    """The checkpoint has the pairs that turn together side by side, not half a head apart."""

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    @property
    def cached_dim(self) -> int:
        """Numbers kept for a token: c and r."""
        return self.rank + self.rotated_dim


def read_latent(raw: Fields) -> Latent:
    latent = Latent(
        q_rank=raw.positive("q_lora_rank") if raw.has("q_lora_rank") else None,
        rank=raw.positive("kv_lora_rank", 512),
        plain_dim=raw.positive("qk_nope_head_dim", 128),
        rotated_dim=raw.positive("qk_rope_head_dim", 64),
        value_dim=raw.positive("v_head_dim", 128),
        interleaved=raw.flag("rope_interleave", default=True),
    )
    if latent.rotated_dim % 2:
        raise raw.refuse("qk_rope_head_dim", latent.rotated_dim, "an even number")
    return latent
