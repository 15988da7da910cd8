"""Weights from a checkpoint into the CPU's packed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.models import _kernels
from shared.models.checkpoint import Checkpoint, Stored
from shared.models.config import Activation, WeightsDtype
from shared.models.cpu import Floats


class Weights:
    """Every matrix is packed once, as it is read: besides the packed weights one tensor is in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, context: _kernels.Context, dtype: WeightsDtype) -> None:
        self._checkpoint, self._context, self._dtype = checkpoint, context, dtype
        self.bytes = 0

    def vector(self, name: str, size: int) -> Floats:
        return np.ascontiguousarray(self._checkpoint.read(name, (size,)).as_float32())

    def stored(self, name: str, shape: tuple[int, int]) -> Stored:
        """The matrix `name` as it is stored, to be rearranged before it is packed."""
        return self._checkpoint.read(name + ".weight", shape)

    def packed(self, matrix: Stored) -> _kernels.Linear:
        linear = self._empty(*matrix.values.shape)
        _fill(linear, 0, matrix)
        return linear

    def exact(self, name: str, outputs: int, inputs: int) -> _kernels.Linear:
        """The matrix `name`, in float32 whatever the others are."""
        linear = _kernels.Linear(self._context, outputs, inputs, "float32")
        _fill(linear, 0, self.stored(name, (outputs, inputs)))
        self.bytes += linear.bytes
        return linear

    def linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool = False
    ) -> _kernels.Linear:
        """The matrices `names`, one below the other."""
        linear = self._empty(sum(outputs), inputs)
        first = 0
        for name, rows in zip(names, outputs, strict=True):
            _fill(linear, first, self.stored(name, (rows, inputs)))
            if bias:
                linear.fill_bias(first, self.vector(name + ".bias", rows))
            first += rows
        return linear

    def gated(
        self, prefix: str, intermediate: int, inputs: int, activation: Activation, *, bias: bool = False
    ) -> _kernels.Linear:
        """gate_proj and up_proj as one: activation(gate x) * (up x)."""
        linear = self._empty(2 * intermediate, inputs, activation)
        for first, name in ((0, prefix + "gate_proj"), (intermediate, prefix + "up_proj")):
            _fill(linear, first, self.stored(name, (intermediate, inputs)))
            if bias:
                linear.fill_bias(first, self.vector(name + ".bias", intermediate))
        return linear

    def _empty(self, outputs: int, inputs: int, activation: Activation | None = None) -> _kernels.Linear:
        gated = activation is not None
        linear = _kernels.Linear(
            self._context, outputs, inputs, self._dtype, gated=gated, activation=activation or "silu"
        )
        self.bytes += linear.bytes
        return linear


def _fill(linear: _kernels.Linear, first: int, stored: Stored) -> None:
    values = np.ascontiguousarray(stored.values)
    if stored.dtype == "float32":
        linear.fill(first, values)
    else:
        linear.fill_half(first, values, stored.dtype)
