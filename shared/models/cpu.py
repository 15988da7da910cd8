"""The network's modules on CPU: native kernels on NumPy arrays, float32 activations.

A row's results do not depend on the rows beside it, bit by bit: see native/kernels/gemm.h and attention_tile.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.layout import KvLayout
from shared.models import _kernels
from shared.models.attention import Placed
from shared.models.collective import Collective
from shared.models.config import ModelConfig
from shared.models.latent import LATENT_NORM_EPS
from shared.models.network import Branch
from shared.models.rope_table import rope_table

Floats = npt.NDArray[np.float32]


class Workspace:
    """Arrays that are kept between forwards, so that no step pays for fresh pages of memory."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def floats(self, name: str, rows: int, columns: int) -> Floats:
        """`[rows, columns]`, undefined values; the same memory for the same name."""
        array = self._arrays.get(name)
        if array is None or array.size < rows * columns:
            array = np.empty(max(rows, 1) * columns, np.float32)
            self._arrays[name] = array
        return array[: rows * columns].reshape(rows, columns)


class CpuNorm:
    """`name`: of the array for results."""

    def __init__(
        self, context: _kernels.Context, workspace: Workspace, weight: Floats, eps: float, name: str = "norm"
    ) -> None:
        self._context, self._workspace, self._weight, self._eps = context, workspace, weight, eps
        self._name = name

    def __call__(self, x: Floats) -> Floats:
        out = self._workspace.floats(self._name, *x.shape)
        _kernels.rms_norm(self._context, x, self._weight, self._eps, out)
        return out


class CpuProjection:
    """`name`: of the array for results; projections whose results do not live at once share one."""

    def __init__(self, context: _kernels.Context, workspace: Workspace, linear: _kernels.Linear, name: str) -> None:
        self._context, self._workspace, self._name = context, workspace, name
        self.linear = linear

    def __call__(self, x: Floats) -> Floats:
        out = self._workspace.floats(self._name, x.shape[0], self.linear.results)
        self.linear.run(self._context, x, out)
        return out

    def add(self, x: Floats, residual: Floats) -> None:
        self.linear.run(self._context, x, residual, add=True)


class NormedBranch:
    """residual += norm(f(x))."""

    def __init__(self, workspace: Workspace, branch: Branch[Floats], norm: CpuNorm) -> None:
        self._workspace, self._branch, self._norm = workspace, branch, norm

    def add(self, x: Floats, residual: Floats) -> None:
        sums = self._workspace.floats("branch", *residual.shape)
        sums[:] = 0.0
        self._branch.add(x, sums)
        residual += self._norm(sums)


class ReducedBranch:
    """residual += the sum of all ranks' f(x): the end of a part of the network that is spread over ranks."""

    def __init__(self, workspace: Workspace, branch: Branch[Floats], peers: Collective) -> None:
        self._workspace, self._branch, self._peers = workspace, branch, peers

    def add(self, x: Floats, residual: Floats) -> None:
        sums = self._workspace.floats("partial", *residual.shape)
        sums[:] = 0.0
        self._branch.add(x, sums)
        self._peers.all_reduce_sum(sums)
        residual += sums


class HeadNorms(NamedTuple):
    """Weights of a layer's norms over the heads of q and k, `[head_dim]`; that of a latent k `[rank]`. None: no norm."""

    q: Floats | None
    k: Floats | None


class CpuAttention:
    """`shared.models.attention.Attention` over a KV region that is mapped as bytes."""

    def __init__(
        self,
        context: _kernels.Context,
        workspace: Workspace,
        config: ModelConfig,
        cache: CpuCache,
        head_norms: Sequence[HeadNorms],
    ) -> None:
        self._context, self._workspace, self._cache, self._heads = context, workspace, cache.view, config.heads
        self._scale, self._windows = config.score_scale, _windows(config)
        self._width = config.heads * (config.latent.rank if config.latent else config.head_dim)
        self._positions = min(config.max_positions, cache.tokens)
        tables = _rope_tables(config, self._positions)
        eps = LATENT_NORM_EPS if config.latent else config.norm_eps
        self._rotary = [
            _kernels.Rotary(table, norms.q, norms.k, eps) for table, norms in zip(tables, head_norms, strict=True)
        ]
        self._batch: _kernels.Batch | None = None

    @property
    def name(self) -> str:
        return f"cpu-{self._context.isa}"

    def plan(self, rows: Sequence[Placed]) -> None:
        for i, row in enumerate(rows):
            if row.start + len(row.tokens) > self._positions:
                raise ValueError(f"row {i}: position {row.start + len(row.tokens) - 1} of {self._positions}")
        tables = [np.frombuffer(row.pages, "<i4") for row in rows]
        lengths = [0, *(table.size for table in tables)][:-1] if tables else []
        self._batch = _kernels.Batch(
            self._cache,
            [len(row.tokens) for row in rows],
            [row.start for row in rows],
            np.concatenate(tables) if tables else np.empty(0, np.int32),
            np.cumsum(lengths, dtype=np.int64).tolist(),
        )

    def append(self, layer: int, qkv: Floats) -> None:
        self._cache.append(self._context, self._planned(), layer, self._heads, self._rotary[layer], qkv)

    def attend(self, layer: int, qkv: Floats) -> Floats:
        out = self._workspace.floats("attention", qkv.shape[0], self._width)
        self._cache.attend(
            self._context, self._planned(), layer, self._heads, self._scale, qkv, out, window=self._windows[layer]
        )
        return out

    def _planned(self) -> _kernels.Batch:
        if self._batch is None:
            raise ValueError("no rows were planned")
        return self._batch


def _windows(config: ModelConfig) -> list[int]:
    """Of each layer; 0: it sees all."""
    window = config.window
    return [window.tokens if local else 0 for local in window.layers] if window else [0] * config.layers


def _rope_tables(config: ModelConfig, positions: int) -> list[Floats]:
    """Of each layer; layers that rotate alike share one."""
    rotated = config.latent.rotated_dim if config.latent else config.head_dim
    table = rope_table(config.rope, rotated, positions)
    if config.window is None:
        return [table] * config.layers
    local = rope_table(config.window.rope, rotated, positions)
    return [local if windowed else table for windowed in config.window.layers]


class CpuCache:
    """The KV region `memory`, `layout.region_bytes(num_pages)` bytes of uint8, as the kernels see it."""

    def __init__(self, layout: KvLayout, num_pages: int, memory: npt.NDArray[np.uint8], rank: int = 0) -> None:
        """`rank`: of a latent cache's c."""
        self.tokens = num_pages * layout.page_size
        self.view = _kernels.Cache(
            memory,
            layout.num_layers,
            num_pages,
            layout.num_kv_heads,
            layout.page_size,
            layout.head_dim,
            layout.dtype,
            rank,
        )
