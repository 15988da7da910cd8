"""What a service needs of its executors, as a Protocol: `shared.engine.group.ExecutorGroup` over processes; tests bring a toy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.engine.protocol import Step, StepDone, StepError
from shared.layout import KvLayout


class StepRunner(Protocol):
    """The executors of one instance. One step at a time. Tensor parallel rank t of data parallel rank d is rank d * tp + t:
    in this order wherever there is one of something a rank."""

    @property
    def tp(self) -> int: ...

    @property
    def dp(self) -> int: ...

    @property
    def ep(self) -> int:
        """Expert parallel: the ranks that the routed experts are spread over; 1 where each rank takes part in all."""
        ...

    @property
    def layout(self) -> KvLayout:
        """Of one rank's region."""
        ...

    @property
    def kv_fds(self) -> Sequence[int]:
        """The memfds of the KV regions, one a rank."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Of one region."""
        ...

    @property
    def counter_fd(self) -> int:
        """The memfd of the layer counter, which the lead rank, 0, advances."""
        ...

    async def step(self, steps: Sequence[Step], *, timeout_s: float) -> list[StepDone | StepError]:
        """Run `steps`, one a data parallel rank, in lockstep: all ranks take part, also those whose step has no rows. Each
        data parallel rank's answer. A `StepError` concerns that rank's rows alone. Raises `StepTimeout` or `ExecutorDied`,
        after which nothing goes on."""
        ...

    async def died(self) -> None:
        """Raises `ExecutorDied` as soon as an executor is no more; never returns."""
        ...
