"""A mixture of experts on CPU."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.models import _kernels
from shared.models.collective import Collective
from shared.models.cpu import CpuProjection, Floats, Workspace
from shared.models.experts import Experts
from shared.models.network import Branch
from shared.models.shard import Shard

Ids = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]


class RoutedExperts(Protocol):
    def add(self, ids: Ids, weights: Floats, x: Floats, residual: Floats) -> None:
        """residual[row] += the sum of weights[row, k] * expert ids[row, k] of x[row], in an order that other rows do not
        change. `ids`, `weights`: `[rows, per_token]`."""
        ...


class CpuExperts:
    """residual += the weighted sum of a token's experts, and the shared expert's result. What a token gets does not depend
    on the others, bit by bit."""

    def __init__(
        self,
        context: _kernels.Context,
        config: Experts,
        gate: CpuProjection,
        bias: Floats | None,
        experts: RoutedExperts,
        shared: Branch[Floats] | None,
    ) -> None:
        self._context, self._per_token, self._gate = context, config.per_token, gate
        self._experts, self._shared = experts, shared
        self._router = _kernels.Router(
            sigmoid=config.sigmoid,
            normalise=config.normalise,
            scale=config.scale,
            groups=config.groups,
            top_groups=config.top_groups,
            bias=bias,
        )

    def add(self, x: Floats, residual: Floats) -> None:
        ids = np.empty((x.shape[0], self._per_token), np.int32)
        weights = np.empty((x.shape[0], self._per_token), np.float32)
        self._router.route(self._context, self._gate(x), ids, weights)
        self._experts.add(ids, weights, x, residual)
        if self._shared is not None:
            self._shared.add(x, residual)


class LocalExperts:
    """All of a layer's experts, or the rank's part of each. Tokens are grouped by expert."""

    def __init__(self, context: _kernels.Context, experts: _kernels.Experts) -> None:
        self._context, self._experts = context, experts

    def add(self, ids: Ids, weights: Floats, x: Floats, residual: Floats) -> None:
        self._experts.add(self._context, ids, weights, x, residual)


class SpreadExperts:
    """A layer's experts spread over the ranks of `peers` as `shard` says, of which `local` are here: expert parallelism.

    A row goes once to every rank that holds one of its experts, with its ids and weights, and comes back as the weighted
    sum of those; the sums are added in the order of ranks. All ranks call it together, also with no rows. In a tensor
    parallel group, whose ranks have the same rows, each sends its share of them alone: the group's sum has them all.
    """

    def __init__(
        self, local: LocalExperts, workspace: Workspace, peers: Collective, shard: Shard, config: Experts
    ) -> None:
        self._local, self._workspace, self._peers, self._shard = local, workspace, peers, shard
        self._per_rank, self._per_token = config.count // shard.ep, config.per_token

    def add(self, ids: Ids, weights: Floats, x: Floats, residual: Floats) -> None:
        own = self._shard.part(x.shape[0])
        destinations, sent, counts = self._destinations(ids[own])
        arrived = self._peers.all_to_all(self._packed(ids[own][sent], weights[own][sent], x[own][sent]), counts)
        results = self._peers.all_to_all(self._run(arrived.values, x.shape[1]), arrived.counts).values
        sums = residual[own]
        for rank in range(self._shard.ep):
            to_rank = destinations == rank
            sums[sent[to_rank]] += results[to_rank]

    def _destinations(self, ids: Ids) -> tuple[Indices, Indices, list[int]]:
        """The rows that are sent, sorted by destination: for each where to, and which one; and how many to each rank."""
        rows = ids.shape[0]
        wanted = np.zeros((self._shard.ep, rows), np.bool_)
        wanted[ids // self._per_rank, np.arange(rows)[:, None]] = True
        destinations, sent = np.nonzero(wanted)
        return destinations, sent, wanted.sum(axis=1).tolist()

    def _packed(self, ids: Ids, weights: Floats, x: Floats) -> Floats:
        """`[rows, hidden + 2 * per_token]`: x, weights, and ids as bits."""
        rows, hidden = x.shape
        packed = self._workspace.floats("dispatched", rows, hidden + 2 * self._per_token)
        packed[:, :hidden] = x
        packed[:, hidden : hidden + self._per_token] = weights
        packed[:, hidden + self._per_token :] = ids.view(np.float32)
        return packed

    def _run(self, packed: Floats, hidden: int) -> Floats:
        """The weighted sums of the experts that are here."""
        x = self._workspace.floats("arrived", packed.shape[0], hidden)
        x[:] = packed[:, :hidden]
        weights = np.ascontiguousarray(packed[:, hidden : hidden + self._per_token])
        ids = np.ascontiguousarray(packed[:, hidden + self._per_token :]).view(np.int32)
        sums = self._workspace.floats("returned", *x.shape)
        sums[:] = 0.0
        self._local.add(ids, weights, x, sums)
        return sums
