"""Page tables and tokens as they travel in a `Row`: int32, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_ints(numbers: Iterable[int]) -> bytes:
    """4 bytes each."""
    table = array("i", numbers)
    if sys.byteorder == "big":
        table.byteswap()
    return table.tobytes()
