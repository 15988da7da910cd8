"""Links that are cut and healed, with real namespaces where they can be had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.chaos.network import Loopback, Namespaces, network


async def reached(host: str) -> bool:
    """Nobody listens there, so that a host that can be reached refuses."""
    try:
        async with asyncio.timeout(1):
            await asyncio.open_connection(host, 9)
    except ConnectionRefusedError:
        return True
    except (TimeoutError, OSError):
        return False
    raise AssertionError("somebody listens")


async def until_reached(host: str) -> None:
    """A link that came up carries nothing before the kernel has noticed."""
    async with asyncio.timeout(10):
        while not await reached(host):
            pass


async def test_a_cut_link_carries_nothing_until_it_is_healed_and_overlapping_cuts_are_one():
    with network(["a", "b"]) as spaces:
        if not isinstance(spaces, Namespaces):
            pytest.skip("no network namespaces here: they need root and iproute2")
        assert spaces.host("a") != spaces.host("b")
        for first, second in zip(spaces.cuts, reversed(spaces.cuts), strict=True):
            await until_reached(spaces.host("b"))
            await spaces.cut("b", first)
            await spaces.cut("b", second)
            assert not await reached(spaces.host("b"))
            assert await reached(spaces.host("a"))
            await spaces.heal("b")
            await spaces.heal("b")
        links = Path("/sys/class/net")
        assert any(link.name.startswith(spaces._tag) for link in links.iterdir())
    assert not any(link.name.startswith(spaces._tag) for link in links.iterdir())


async def test_loopback_has_no_link_to_cut():
    assert (Loopback().host("a"), Loopback().prefix("a"), Loopback.cuts) == ("127.0.0.1", [], ())
    await Loopback().heal("a")
    with pytest.raises(RuntimeError, match="no link"):
        await Loopback().cut("a", "link down")
