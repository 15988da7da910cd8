"""The projections of latent attention on CPU, absorbed: see `shared.models.latent`."""

from __future__ import annotations

from collections.abc import Callable

from shared.models import _kernels
from shared.models.cpu import CpuProjection, Floats, Workspace
from shared.models.latent import Latent


class LatentProjection:
    """`[tokens, (heads + 1) * cached_dim]`: each head's query, taken to the latents, and its part to be rotated; then the
    latent, not normalised yet, and the key's part to be rotated."""

    def __init__(
        self,
        context: _kernels.Context,
        workspace: Workspace,
        config: Latent,
        queries: Callable[[Floats], Floats],
        absorb: list[_kernels.Linear],
        latent: _kernels.Linear,
    ) -> None:
        """`queries`: to `[tokens, heads * query_dim]`. `absorb`: K_h^T of each head. `latent`: to `[tokens, cached_dim]`."""
        self._context, self._workspace, self._config, self._queries = context, workspace, config, queries
        self._heads = len(absorb)
        self._absorb = _kernels.Columns(absorb, x_step=config.query_dim, out_step=config.cached_dim)
        self._latent = _kernels.Columns([latent], out_first=self._heads * config.cached_dim)

    def __call__(self, x: Floats) -> Floats:
        config, heads, tokens = self._config, self._heads, x.shape[0]
        out = self._workspace.floats("qkv", tokens, (heads + 1) * config.cached_dim)
        self._latent.run(self._context, x, out)
        queries = self._queries(x)
        self._absorb.run(self._context, queries, out)
        rotated = queries.reshape(tokens, heads, config.query_dim)[:, :, config.plain_dim :]
        out.reshape(tokens, heads + 1, config.cached_dim)[:, :heads, config.rank :] = rotated
        return out


class LatentOut:
    """Weighted sums of latents `[tokens, heads * rank]` to values, and on through the output projection."""

    def __init__(
        self,
        context: _kernels.Context,
        workspace: Workspace,
        config: Latent,
        values: list[_kernels.Linear],
        out: CpuProjection,
    ) -> None:
        """`values`: V_h of each head."""
        self._context, self._workspace, self._out = context, workspace, out
        self._width = len(values) * config.value_dim
        self._values = _kernels.Columns(values, x_step=config.rank, out_step=config.value_dim)

    def add(self, x: Floats, residual: Floats) -> None:
        values = self._workspace.floats("values", x.shape[0], self._width)
        self._values.run(self._context, x, values)
        self._out.add(values, residual)
