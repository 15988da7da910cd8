"""What a service needs of an executor, as a Protocol: `shared.engine.client.Executor` over a process; tests bring a toy."""

from __future__ import annotations

from typing import Protocol

from shared.engine.protocol import Step, StepDone


class StepRunner(Protocol):
    """One executor. One step at a time."""

    @property
    def kv_fd(self) -> int:
        """The memfd of the KV region."""
        ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def counter_fd(self) -> int:
        """The memfd of the layer counter."""
        ...

    async def step(self, step: Step, *, timeout_s: float) -> StepDone:
        """Raises `StepFailed` (it goes on), `StepTimeout` or `ExecutorDied` (it does not)."""
        ...

    async def died(self) -> None:
        """Raises `ExecutorDied` as soon as the executor is no more; never returns."""
        ...
