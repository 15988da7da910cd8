"""What the network needs of attention over the paged cache: `shared.models.cpu` has it in native code for CPUs; on CUDA
FlashInfer will provide it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from shared.messages import Sampling, Scoring

A = TypeVar("A")


class Placed(Protocol):
    """Tokens at positions start, start + 1, ... of a page table."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def pages(self) -> bytes: ...


class BatchRow(Placed, Protocol):
    """One row of a step: see `shared.engine.protocol.Row`, which is one."""

    @property
    def sample(self) -> Sampling | None: ...
    @property
    def drafts(self) -> int: ...
    @property
    def propose(self) -> int: ...
    @property
    def chained(self) -> int: ...
    @property
    def following(self) -> int | None: ...
    @property
    def hidden(self) -> bytes: ...
    @property
    def history(self) -> bytes: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def forbidden(self) -> list[int]: ...
    @property
    def mask(self) -> bytes: ...
    @property
    def scoring(self) -> Scoring | None: ...


class Attention(Protocol[A]):
    """Attention of one model over one KV region. `A` is the device's array type.

    `qkv` is `[tokens, (heads + 2 * kv_heads) * head_dim]`, the rows' tokens one after the other; the result of `attend`
    is `[tokens, heads * head_dim]` and valid until the next call. Latent attention has no v and one k, see
    `shared.models.latent`: `[tokens, (heads + 1) * head_dim]`, and `[tokens, heads * rank]` as the result. A token attends to
    the positions 0 .. its own of its row. What it gets must not depend, beyond float order, on the other rows or on how a
    prompt was cut into chunks.
    """

    @property
    def name(self) -> str:
        """Which kernels run, for example "cpu-avx2"."""
        ...

    def plan(self, rows: Sequence[Placed]) -> None:
        """Take the rows of the next forward. Raises `ValueError` where a page table is too short, or names a page or a
        position that does not exist; nothing was written then."""
        ...

    def append(self, layer: int, qkv: A) -> None:
        """Normalise (where the model does) and rotate q and k, in place, and write k and v into the rows' pages."""
        ...

    def attend(self, layer: int, qkv: A) -> A: ...
