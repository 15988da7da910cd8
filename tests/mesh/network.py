"""Hosts as network namespaces on one bridge, whose links a test can cut. Needs root, `ip` and `ip netns`."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class NoNamespaces(Exception):
    """They cannot be made here."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Network:
    """This namespace is on the bridge too, at `gateway`."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(2)
        self._subnet = f"10.213.{secrets.randbelow(256)}"
        self._bridge = f"kvb{self._id}"
        self._hosts: dict[str, int] = {}
        self.gateway = f"{self._subnet}.1"
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    def add(self, name: str) -> None:
        number = len(self._hosts) + 2
        self._hosts[name] = number
        space = self._space(name)
        _ip("netns", "add", space)
        _ip("link", "add", self._link(name), "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", space, "link", "set", link, "up")
        _ip("link", "set", self._link(name), "master", self._bridge, "up")

    def address(self, name: str) -> str:
        return f"{self._subnet}.{self._hosts[name]}"

    def inside(self, name: str) -> list[str]:
        """What to put in front of a command that is to run there."""
        return ["ip", "netns", "exec", self._space(name)]

    def pull(self, name: str) -> None:
        """The link is down, and the host knows."""
        _ip("-n", self._space(name), "link", "set", "eth0", "down")

    def plug(self, name: str) -> None:
        _ip("-n", self._space(name), "link", "set", "eth0", "up")

    def lose(self, name: str) -> None:
        """Nothing passes any more, and nobody is told: 100 % loss."""
        _ip("link", "set", self._link(name), "nomaster")

    def find(self, name: str) -> None:
        _ip("link", "set", self._link(name), "master", self._bridge)

    def close(self) -> None:
        for name in self._hosts:
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", self._link(name)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def _space(self, name: str) -> str:
        return f"kv{self._id}-{name}"

    def _link(self, name: str) -> str:
        return f"kv{self._id}v{self._hosts[name]}"


@contextmanager
def network(*hosts: str) -> Iterator[Network]:
    """Raises `NoNamespaces` with the reason."""
    if os.geteuid() or shutil.which("ip") is None:
        raise NoNamespaces("they need root and iproute2")
    made = Network()
    try:
        for host in hosts:
            made.add(host)
        yield made
    finally:
        made.close()
