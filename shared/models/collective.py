"""What the ranks of an instance do together: sums over a tensor parallel group, all-to-all over the ranks that share experts.

Between processes of one machine they go through memory that all map. Not through gloo: it comes with torch, which no
executor imports on CPU, and sends through sockets what a copy and a futex can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import RankLost
from shared.models import _kernels

DEADLINE_S = 60.0
"""How long a rank waits for another within a step; steps have deadlines of their own, mostly shorter."""


class Collective(Protocol):
    """One rank's end. Every rank makes the same calls in the same order, from one thread."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...

    def all_reduce_sum(self, values: npt.NDArray[np.float32]) -> None:
        """`values`, `[rows, columns]` and of one shape in all ranks, become their sum, in place; the same bits everywhere.

        Raises `RankLost` where a rank has ended or does not come by the deadline: `values` are undefined then, and every
        later call may raise."""
        ...

    def gather(self, values: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        """`values`, of one shape in all ranks, one rank's below the other's into rank 0's `out`, `[ranks * rows, columns]`;
        that of other ranks is not touched. Raises as `all_reduce_sum` does."""
        ...

    def all_to_all(self, rows: npt.NDArray[np.float32], counts: Sequence[int]) -> Rows:
        """`rows`, `[sum(counts), width]`, are sorted by destination: counts[d] of them, also none, go to rank d. What all
        ranks sent to this one. `width` is the same in all ranks. Raises as `all_reduce_sum` does, and `ValueError`, in all
        ranks, for rows that are too wide."""
        ...

    def barrier(self) -> None:
        """Returns when all ranks have come; what each wrote before is visible to all. Raises as `all_reduce_sum` does."""
        ...


class Rows(NamedTuple):
    """`[sum(counts), width]`: counts[s] rows from rank s, in the order of ranks, and of each as it sent them."""

    values: npt.NDArray[np.float32]
    counts: list[int]


class Peers(NamedTuple):
    """Whom a rank works with. `tensor`: those that hold the other shards of its rows' heads; `experts`: all ranks of the
    instance, where the routed experts are spread over them. None: nobody."""

    tensor: Collective | None = None
    experts: Collective | None = None


class SharedMemory:
    """A `Collective` over memory, at first zeros, that all ranks map; `shared.engine.collective` makes it.

    A rank that has ended is noticed within 0.1 s of waiting for it. A waiting rank spins for some tens of microseconds,
    where every rank has a processor, and sleeps then."""

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int, ranks: int, *, deadline_s: float = DEADLINE_S) -> None:
        """Raises `ValueError` where the memory is too small."""
        self.rank, self.ranks = rank, ranks
        self._ends = _kernels.Communicator(memory, rank, ranks)
        self._deadline_s = deadline_s

    def all_reduce_sum(self, values: npt.NDArray[np.float32]) -> None:
        self._check(self._ends.all_reduce_sum(values, self._deadline_s))

    def gather(self, values: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
        self._check(self._ends.gather(values, out, self._deadline_s))

    def all_to_all(self, rows: npt.NDArray[np.float32], counts: Sequence[int]) -> Rows:
        received = self._ends.all_to_all(rows, np.array(counts, np.int64), self._deadline_s)
        if isinstance(received, int):
            raise RankLost(received, self.ranks, self._deadline_s)
        return Rows(*received)

    def barrier(self) -> None:
        self._check(self._ends.barrier(self._deadline_s))

    def _check(self, missing: int | None) -> None:
        if missing is not None:
            raise RankLost(missing, self.ranks, self._deadline_s)
