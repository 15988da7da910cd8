"""The Python face of a layer watcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.errors import FabricError
from shared.transfer import _native
from shared.transfer.handles import Writes
from shared.transfer.interface import PagedWrite, Transfer


class Watcher:
    """A `LayerWatcher`: a native thread that waits on one counter. The counter's descriptor is not kept."""

    def __init__(self, native: _native.LayerWatcher, arm: Callable[[int, Sequence[PagedWrite]], list[Writes]]) -> None:
        self._native, self._arm = native, arm
        self._open = True

    def arm(self, first: int, writes: Sequence[PagedWrite]) -> list[Transfer]:
        if not self._open:
            raise FabricError("the layer watcher is closed", call="arm")
        return [*self._arm(first, writes)]

    def disarm(self) -> None:
        self._native.disarm()

    def close(self) -> None:
        """Drops all plans, whose transfers end as cancelled, and ends the thread. Idempotent."""
        self._open = False
        self._native.close()
