"""Page tables as they travel in a `Row`: int32, little-endian."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_pages(pages: Iterable[int]) -> bytes:
    """4 bytes a page."""
    table = array("i", pages)
    if sys.byteorder == "big":
        table.byteswap()
    return table.tobytes()
