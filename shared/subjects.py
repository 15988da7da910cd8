"""NATS subject names. An instance's inbox names its incarnation, so that a message for an earlier start goes nowhere.

kvmesh.announce                       every instance's heartbeats
kvmesh.discover                       a router asks every instance to announce itself now
kvmesh.decode.<name>.<incarnation>    ToDecoder
kvmesh.prefill.<name>.<incarnation>   ToPrefiller
kvmesh.router.<name>.<incarnation>    ToRouter
"""

from __future__ import annotations

import re
from typing import Literal

from shared.errors import ConfigError
from shared.messages import InstanceRef

ANNOUNCE = "kvmesh.announce"
DISCOVER = "kvmesh.discover"

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_name(setting: str, name: str) -> str:
    """`name` itself, where it can stand in a subject; `ConfigError` else."""
    if not _NAME.fullmatch(name):
        raise ConfigError(setting, name, "lower-case letters, digits and '-', 1 to 63 of them")
    return name


def inbox(role: Literal["router", "prefill", "decode"], instance: InstanceRef) -> str:
    """The subject on which this start of the instance listens."""
    return f"kvmesh.{role}.{instance.name}.{instance.incarnation:016x}"
