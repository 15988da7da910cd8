"""The matrices of latent attention, taken apart by head for the absorbed form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shared.models import _kernels
from shared.models.checkpoint import Stored
from shared.models.config import ModelConfig
from shared.models.cpu import CpuNorm, CpuProjection, Floats, Workspace
from shared.models.cpu_latent import LatentOut, LatentProjection
from shared.models.latent import LATENT_NORM_EPS
from shared.models.weights import Part, Weights


class LatentLoader:
    """`heads`: those to load, of all the model's. What makes the latents is loaded whole."""

    def __init__(
        self, config: ModelConfig, heads: slice, weights: Weights, context: _kernels.Context, workspace: Workspace
    ) -> None:
        assert config.latent is not None
        self._config, self._latent, self._weights = config, config.latent, weights
        self._taken, self._context, self._workspace = heads, context, workspace

    def norm(self, prefix: str) -> Floats:
        return self._weights.vector(prefix + "kv_a_layernorm.weight", self._latent.rank)

    def attention(self, prefix: str) -> tuple[LatentProjection, LatentOut]:
        keys, values = self._heads(prefix)
        return self._projection(prefix, keys), self._out(prefix, values)

    def _projection(self, prefix: str, keys: list[_kernels.Linear]) -> LatentProjection:
        latent, hidden = self._latent, self._config.hidden
        down = self._weights.stored(prefix + "kv_a_proj_with_mqa", (latent.cached_dim, hidden))
        packed = self._weights.packed(Stored(self._untwined(down.values, latent.rank), down.dtype))
        return LatentProjection(self._context, self._workspace, latent, self._queries(prefix), keys, packed)

    def _out(self, prefix: str, values: list[_kernels.Linear]) -> LatentOut:
        wide = self._latent.value_dim
        columns = slice(self._taken.start * wide, self._taken.stop * wide)
        part = Part(prefix + "o_proj", self._config.hidden, self._config.heads * wide, columns=columns)
        linear = self._weights.linear([part])
        out = CpuProjection(self._context, self._workspace, linear, "out")
        return LatentOut(self._context, self._workspace, self._latent, values, out)

    def _heads(self, prefix: str) -> tuple[list[_kernels.Linear], list[_kernels.Linear]]:
        """K_h^T and V_h of the heads taken."""
        latent, heads = self._latent, self._config.heads
        wide = latent.plain_dim + latent.value_dim
        stored = self._weights.stored(prefix + "kv_b_proj", (heads * wide, latent.rank))
        parts = stored.values.reshape(heads, wide, latent.rank)[self._taken]
        keys = [self._weights.packed(Stored(part[: latent.plain_dim].T, stored.dtype)) for part in parts]
        values = [self._weights.packed(Stored(part[latent.plain_dim :], stored.dtype)) for part in parts]
        return keys, values

    def _queries(self, prefix: str) -> Callable[[Floats], Floats]:
        config, latent = self._config, self._latent
        if latent.q_rank is None:
            return CpuProjection(self._context, self._workspace, self._up(prefix + "q_proj", config.hidden), "queries")
        down = self._weights.linear([Part(prefix + "q_a_proj", latent.q_rank, config.hidden)])
        low = CpuProjection(self._context, self._workspace, down, "low queries")
        weight = self._weights.vector(prefix + "q_a_layernorm.weight", latent.q_rank)
        norm = CpuNorm(self._context, self._workspace, weight, LATENT_NORM_EPS, "low norm")
        up = CpuProjection(self._context, self._workspace, self._up(prefix + "q_b_proj", latent.q_rank), "queries")
        return lambda x: up(norm(low(x)))

    def _up(self, name: str, inputs: int) -> _kernels.Linear:
        latent, heads = self._latent, self._config.heads
        stored = self._weights.stored(name, (heads * latent.query_dim, inputs))
        parts = stored.values.reshape(heads, latent.query_dim, inputs)[self._taken]
        whole = np.concatenate([self._untwined(part, latent.plain_dim) for part in parts])
        return self._weights.packed(Stored(whole, stored.dtype))

    def _untwined(self, rows: np.ndarray, first: int) -> np.ndarray:
        """Rows from `first` on, the rotated ones, with the pairs that turn together half of them apart."""
        if not self._latent.interleaved:
            return rows
        return np.concatenate([rows[:first], rows[first::2], rows[first + 1 :: 2]])
