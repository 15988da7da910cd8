"""What a process cannot be told in advance where it runs as one of many alike: its name and its own address."""

from __future__ import annotations

import re
import socket
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from shared.config import InstanceSettings, Settings
from shared.errors import ConfigError
from shared.subjects import Service

AUTO = "auto"

S = TypeVar("S", bound=Settings)


def settle(settings: S, role: Service) -> S:
    """`settings` with every "auto" and the name decided. Raises `ConfigError`."""
    found: dict[str, str] = {"name": _name(settings.name, role)}
    if settings.host == AUTO:
        found["host"] = own_address("KVMESH_HOST", settings.nats_url)
    if isinstance(settings, InstanceSettings) and settings.fabric_host == AUTO:
        found["fabric_host"] = own_address("KVMESH_FABRIC_HOST", settings.nats_url)
    return msgspec.structs.replace(settings, **found)


def own_address(setting: str, nats_url: str) -> str:
    """The address of this host that the broker sees: where several networks are, the one that the mesh meets on. Nothing is
    sent. Raises `ConfigError` where the broker's name has no address, or none that can be reached."""
    try:
        host, port = urlsplit(nats_url).hostname, urlsplit(nats_url).port or 4222
    except ValueError:  # a port that is no number
        host, port = None, 0
    if host is None:
        raise ConfigError(setting, AUTO, f"an address; {AUTO!r} needs the broker's in KVMESH_NATS_URL")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        takes = f"an address; {AUTO!r} needs a way to the broker at {host!r} ({error})"
        raise ConfigError(setting, AUTO, takes) from None


def _name(name: str, role: Service) -> str:
    if name != AUTO:
        return name or role
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"{role}-{host}"[:63].rstrip("-")
