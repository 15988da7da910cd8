"""The decoder-only transformer that all architectures share, over modules that a device provides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from shared.models.attention import Attention

A = TypeVar("A")
A_contra = TypeVar("A_contra", contravariant=True)


class Norm(Protocol[A]):
    def __call__(self, x: A) -> A:
        """RMS norm of each row. The result is valid until the next call of any norm."""
        ...


class Projection(Protocol[A]):
    def __call__(self, x: A) -> A:
        """W x + b for each row. The result is valid until the next call of this projection."""
        ...


class Branch(Protocol[A_contra]):
    def add(self, x: A_contra, residual: A_contra) -> None:
        """residual += f(x), in place."""
        ...


class Dense(Generic[A]):
    """A feed-forward. `gate_up` is fused: activation(gate x) * (up x)."""

    def __init__(self, gate_up: Projection[A], down: Branch[A]) -> None:
        self.gate_up, self.down = gate_up, down

    def add(self, x: A, residual: A) -> None:
        self.down.add(self.gate_up(x), residual)


class Block(Generic[A]):
    """One layer. q, k and v are one projection."""

    def __init__(
        self,
        *,
        attention_norm: Norm[A],
        qkv: Projection[A],
        out: Branch[A],
        mlp_norm: Norm[A],
        mlp: Branch[A],
    ) -> None:
        self.attention_norm, self.qkv, self.out = attention_norm, qkv, out
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def keep(self, layer: int, x: A, attention: Attention[A]) -> A:
        """K and V of x's tokens into the cache; returns the rotated q, k, v."""
        qkv = self.qkv(self.attention_norm(x))
        attention.append(layer, qkv)
        return qkv

    def attend(self, layer: int, x: A, qkv: A, attention: Attention[A]) -> None:
        self.out.add(attention.attend(layer, qkv), x)

    def feed_forward(self, x: A) -> None:
        self.mlp.add(self.mlp_norm(x), x)


class Network(Generic[A]):
    """`blocks` between the embedding, which the caller does, and the final norm and head."""

    def __init__(
        self,
        blocks: Sequence[Block[A]],
        norm: Norm[A],
        head: Projection[A] | None,
        fence: Callable[[], None] | None = None,
        first_layer: int = 0,
    ) -> None:
        """`head` None: a network that only fills the cache. `fence`: returns when the cache has what all ranks wrote, which
        otherwise the end of attention waits for; None where there is one rank. `first_layer`: in the cache."""
        self._first_layer = first_layer
        self.blocks, self.norm, self.head, self._fence = blocks, norm, head, fence

    def run(
        self, x: A, attention: Attention[A], after_attention: Callable[[], None] | None, *, fill_only: bool
    ) -> None:
        """x, the embedded tokens of the rows that `attention` was planned for, becomes the last hidden states, in place.

        `after_attention` is called once a layer, when the layer's K and V are in the caches of all ranks. `fill_only`:
        only the cache is wanted, and x is left undefined: the last layer ends with its K and V.
        """
        for layer, block in enumerate(self.blocks, self._first_layer):
            qkv = block.keep(layer, x, attention)
            last = fill_only and block is self.blocks[-1]
            if not last:
                block.attend(layer, x, qkv, attention)
            elif self._fence is not None:
                self._fence()
            if after_attention is not None:
                after_attention()
            if not last:
                block.feed_forward(x)

    def logits(self, x: A) -> A:
        """`[rows, vocab]` of hidden states `[rows, hidden]`; valid until the next call."""
        if self.head is None:
            raise ValueError("this network was loaded without its output head")
        return self.head(self.norm(x))
