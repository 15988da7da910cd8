"""The one place where native errors become kvmesh's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import (
    FabricError,
    FabricUnavailable,
    PeerLost,
    PeerUnreachable,
    RemoteAccessError,
    TransferCancelled,
    TransferTimeout,
)
from shared.transfer import _native

OK = 0
ERRORS: dict[int, type[FabricError]] = {
    1: TransferCancelled,
    2: TransferTimeout,
    3: PeerLost,
    4: RemoteAccessError,
    5: PeerUnreachable,
    6: FabricUnavailable,
    7: FabricError,
}


def event_error(event: _native.Event, peer: int | None) -> FabricError | None:
    """What an event says went wrong, if anything did."""
    if event.status == OK:
        return None
    return ERRORS[event.status](event.text, call=event.call, code=event.code, peer=peer)


@contextmanager
def mapped(peer: int | None = None) -> Iterator[None]:
    """Native errors raised inside leave as one of kvmesh's."""
    try:
        yield
    except _native.Error as error:
        status, call, code, text = error.args
        raise ERRORS[status](text, call=call, code=code, peer=peer) from None
