"""CPU kernels: packed linears, paged attention, sampling. Arrays are C-contiguous NumPy arrays."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Context:
    """Threads, the instruction set in use, and scratch memory. Used by one thread at a time."""

    def __init__(self, threads: int, isa: str = "auto") -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Linear:
    """A packed matrix of weights [outputs, inputs]; gated: activation(gate) * up of its two halves."""

    def __init__(
        self,
        context: Context,
        outputs: int,
        inputs: int,
        dtype: str,
        *,
        gated: bool = False,
        activation: str = "silu",
    ) -> None: ...
    def fill(self, first: int, source: NDArray[np.float32]) -> None:
        """Rows first.. of the matrix from float32 [rows, inputs]."""

    def fill_half(self, first: int, source: NDArray[np.uint16], type: str) -> None:
        """The same from raw bfloat16 or float16."""

    def fill_bias(self, first: int, source: NDArray[np.float32]) -> None: ...
    def run(self, context: Context, x: NDArray[np.float32], out: NDArray[np.float32], *, add: bool = False) -> None:
        """out = W x + b, or out += W x + b."""

    def embed(self, context: Context, tokens: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Rows `tokens` of the matrix."""

    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def results(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class Columns:
    """Linears over columns of one array: linear i reads from x_first + i * x_step on, and writes from
    out_first + i * out_step on."""

    def __init__(
        self,
        linears: Sequence[Linear],
        *,
        x_first: int = 0,
        x_step: int = 0,
        out_first: int = 0,
        out_step: int = 0,
    ) -> None: ...
    def run(self, context: Context, x: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...

class Router:
    """From logits to experts: softmax, or sigmoid with a bias and groups (DeepSeek-V3)."""

    def __init__(
        self,
        *,
        sigmoid: bool,
        normalise: bool,
        scale: float,
        groups: int,
        top_groups: int,
        bias: NDArray[np.float32] | None,
    ) -> None: ...
    def route(
        self, context: Context, logits: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]
    ) -> None:
        """Fills ids and weights [rows, per_token], best first; equal scores go to the smaller number."""

class Experts:
    """Gated linears and their way back, numbered from `first` on, of `total`; copies share the weights."""

    def __init__(
        self, gate_up: Sequence[Linear], down: Sequence[Linear], *, first: int = 0, total: int | None = None
    ) -> None: ...
    def add(
        self,
        context: Context,
        ids: NDArray[np.int32],
        weights: NDArray[np.float32],
        x: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        """out[row] += weight * expert(x[row]), by ascending expert, over those that are here."""

class Batch:
    """The rows of one step, checked against the cache."""

    def __init__(
        self,
        cache: Cache,
        counts: Sequence[int],
        starts: Sequence[int],
        tables: NDArray[np.int32],
        table_begins: Sequence[int],
    ) -> None: ...
    @property
    def tokens(self) -> int: ...

class Rotary:
    """Rotary table [positions, head_dim] (cosines, sines) and optional head norms."""

    def __init__(
        self,
        table: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None,
        k_norm: NDArray[np.float32] | None,
        eps: float,
    ) -> None: ...

class Cache:
    """A view of paged KV memory [layer][page][k/v][head][token][dim]. latent: no V, the first `latent` numbers of a key
    are its value."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        layers: int,
        pages: int,
        heads: int,
        page_size: int,
        dim: int,
        dtype: str,
        latent: int = 0,
    ) -> None: ...
    def append(
        self, context: Context, batch: Batch, layer: int, query_heads: int, rotary: Rotary, qkv: NDArray[np.float32]
    ) -> None:
        """Norm and rotate q and k in place; write k and v into the pages."""

    def attend(
        self,
        context: Context,
        batch: Batch,
        layer: int,
        query_heads: int,
        scale: float,
        qkv: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        window: int = 0,
    ) -> None:
        """Causal attention of every token over its row's pages, or over the last `window` tokens."""

class LayerCounter:
    """The 64-bit layer counter in shared memory."""

    def __init__(self, word: NDArray[np.uint64]) -> None: ...
    def advance(self) -> int: ...
    def wait_above(self, value: int, timeout_s: float) -> int:
        """Sleep until the counter is above `value`, or the time is up; what it is then."""

    @property
    def value(self) -> int: ...

class Communicator:
    """One rank's end of the memory that a group of ranks shares."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, ranks: int) -> None: ...
    def all_reduce_sum(self, values: NDArray[np.float32], timeout_s: float) -> int | None:
        """Add the other ranks' values, in place; the rank that is missing, or None."""

    def gather(self, values: NDArray[np.float32], out: NDArray[np.float32], timeout_s: float) -> int | None:
        """All ranks' values into rank 0's out, in the order of ranks; the rank that is missing, or None."""

    def all_to_all(
        self, rows: NDArray[np.float32], counts: NDArray[np.int64], timeout_s: float
    ) -> tuple[NDArray[np.float32], list[int]] | int:
        """Rows sorted by destination, counts[d] of them to rank d; what came, in the order of sources, and how many from
        each; or the rank that is missing."""

    def barrier(self, timeout_s: float) -> int | None:
        """Wait for all ranks; the rank that is missing, or None."""

def rms_norm(
    context: Context, x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, out: NDArray[np.float32]
) -> None: ...
def sample(context: Context, logits: NDArray[np.float32], draws: NDArray[np.float64], out: NDArray[np.int32]) -> None:
    """One token a row. draws [rows, 5]: temperature, top_p, min_p, top_k, uniform. -1 where no logit is finite."""

def philox_uniform(seed: int, position: int) -> float: ...
def philox(k0: int, k1: int, counter: Sequence[int]) -> list[int]: ...
def instruction_sets() -> list[str]: ...
