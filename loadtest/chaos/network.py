"""A network namespace for every part, on one bridge, so that a part's link can be cut. Needs root and `ip netns`.

Where that is not allowed, `Loopback` stands in: every part on 127.0.0.1, and no link to cut.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

Cut = Literal["link down", "all packets lost"]


class Network(Protocol):
    """Where parts run. `cuts`: the ways in which a link can be cut; empty: none."""

    cuts: tuple[Cut, ...]

    def host(self, name: str) -> str:
        """The address of a part. Raises `KeyError` for one that was not named at the start."""
        ...

    def prefix(self, name: str) -> list[str]:
        """What stands before a part's command."""
        ...

    async def cut(self, name: str, how: Cut) -> None:
        """One that is cut already stays as it is."""
        ...

    async def heal(self, name: str) -> None:
        """Undoes the cut. Idempotent."""
        ...


class Loopback:
    cuts: tuple[Cut, ...] = ()

    def host(self, name: str) -> str:
        return "127.0.0.1"

    def prefix(self, name: str) -> list[str]:
        return []

    async def cut(self, name: str, how: Cut) -> None:
        raise RuntimeError("there is no link to cut")

    async def heal(self, name: str) -> None:
        return


class Namespaces:
    """Made by `namespaces`. The bridge is in the namespace of this process, which so reaches every part."""

    def __init__(self, names: list[str]) -> None:
        draw = random.Random(os.getpid())
        self._tag = f"kc{os.getpid() % 0xFFFFF:x}"
        self._net = f"10.{draw.randint(64, 254)}.{draw.randint(1, 254)}"
        self._index = {name: index for index, name in enumerate(names)}
        self._cut: dict[str, Cut] = {}
        self._locks = {name: asyncio.Lock() for name in names}
        self.cuts: tuple[Cut, ...] = ("link down", "all packets lost") if shutil.which("bridge") else ("link down",)

    def host(self, name: str) -> str:
        return f"{self._net}.{self._index[name] + 10}"

    def prefix(self, name: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._space(name)}"]

    async def cut(self, name: str, how: Cut) -> None:
        async with self._locks[name]:
            if name not in self._cut:
                self._cut[name] = how
                await self._set(name, how, cut=True)

    async def heal(self, name: str) -> None:
        async with self._locks[name]:
            if name in self._cut:
                await self._set(name, self._cut.pop(name), cut=False)

    async def _set(self, name: str, how: Cut, *, cut: bool) -> None:
        """A port of the bridge that is down cannot be given a state, so only one kind of cut at a time."""
        if how == "link down":
            await _run("ip", "link", "set", self._link(name), "down" if cut else "up")
        else:
            await _run("bridge", "link", "set", "dev", self._link(name), "state", "0" if cut else "3")

    def make(self) -> None:
        """Raises `OSError` or `CalledProcessError` where it is not allowed; `remove` then clears what there is."""
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("addr", "add", f"{self._net}.1/24", "dev", self._tag)
        _ip("link", "set", self._tag, "up")
        for name in self._index:
            space, link = self._space(name), self._link(name)
            _ip("netns", "add", space)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", space, "addr", "add", f"{self.host(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("link", "set", link, "master", self._tag)
            _ip("link", "set", link, "up")

    def remove(self) -> None:
        """Idempotent. What a part still holds goes with its last process."""
        for name in self._index:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("link", "del", self._link(name))
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", self._space(name))
        with suppress(OSError, subprocess.CalledProcessError):
            _ip("link", "del", self._tag)

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _link(self, name: str) -> str:
        return f"{self._tag}v{self._index[name]}"


@contextmanager
def network(names: list[str]) -> Iterator[Network]:
    """Namespaces where they can be had, else loopback."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        yield Loopback()
        return
    spaces = Namespaces(names)
    try:
        try:
            spaces.make()
            found: Network = spaces
        except (OSError, subprocess.CalledProcessError):
            found = Loopback()
        yield found
    finally:
        spaces.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {said.decode().strip()}")
