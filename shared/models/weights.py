"""Weights from a checkpoint into the CPU's packed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.models import _kernels
from shared.models.checkpoint import Checkpoint, Stored
from shared.models.config import Activation, WeightsDtype
from shared.models.cpu import Floats

ALL = slice(None)


class Part(NamedTuple):
    """Rows and columns of the matrix `name`, `[outputs, inputs]` in the checkpoint."""

    name: str
    outputs: int
    inputs: int
    rows: slice = ALL
    columns: slice = ALL

    @property
    def shape(self) -> tuple[int, int]:
        return len(range(self.outputs)[self.rows]), len(range(self.inputs)[self.columns])


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

    def linear(self, parts: Sequence[Part], *, bias: bool = False) -> _kernels.Linear:
        """`parts`, one below the other. `bias`: with the rows' biases, whichever columns are taken."""
        linear = self._empty(sum(part.shape[0] for part in parts), parts[0].shape[1])
        self._fill_parts(linear, parts, bias=bias)
        return linear

    def gated(self, gate: Part, up: Part, activation: Activation, *, bias: bool = False) -> _kernels.Linear:
        """Both as one: activation(gate x) * (up x)."""
        linear = self._empty(gate.shape[0] + up.shape[0], gate.shape[1], activation)
        self._fill_parts(linear, [gate, up], bias=bias)
        return linear

    def _fill_parts(self, linear: _kernels.Linear, parts: Sequence[Part], *, bias: bool) -> None:
        first = 0
        for part in parts:
            stored = self.stored(part.name, (part.outputs, part.inputs))
            _fill(linear, first, Stored(stored.values[part.rows, part.columns], stored.dtype))
            if bias:
                values = self.vector(part.name + ".bias", part.outputs)[part.rows]
                linear.fill_bias(first, np.ascontiguousarray(values))
            first += part.shape[0]

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
