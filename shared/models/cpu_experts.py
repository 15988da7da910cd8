"""A mixture of experts on CPU."""

from __future__ import annotations

import numpy as np

from shared.models import _kernels
from shared.models.cpu import CpuProjection, Floats
from shared.models.experts import Experts
from shared.models.network import Branch


class CpuExperts:
    """residual += the weighted sum of a token's experts, and the shared expert's result. Tokens are grouped by expert; what
    one gets does not depend on the others, bit by bit."""

    def __init__(
        self,
        context: _kernels.Context,
        config: Experts,
        gate: CpuProjection,
        bias: Floats | None,
        experts: _kernels.Experts,
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
        self._experts.add(self._context, ids, weights, x, residual)
        if self._shared is not None:
            self._shared.add(x, residual)
