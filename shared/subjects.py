"""NATS subject names. An instance's inbox names its incarnation, so that a message for an earlier start goes nowhere.

kvmesh.announce                       every instance's heartbeats
kvmesh.discover                       a router asks every instance to announce itself now
kvmesh.decode.<name>.<incarnation>    ToDecoder
kvmesh.prefill.<name>.<incarnation>   ToPrefiller
kvmesh.router.<name>.<incarnation>    ToRouter
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from shared.errors import ConfigError
from shared.messages import InstanceRef

ANNOUNCE = "kvmesh.announce"
DISCOVER = "kvmesh.discover"

Service = Literal["router", "prefill", "decode"]


class Rights(NamedTuple):
    """The subjects that a role needs, as patterns; besides, it may answer whatever it was asked."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def rights(role: Service) -> Rights:
    """What the broker should let a role do, and nothing more. A router listens to its own inbox from outside, to know that it
    hears; everybody sends to its own reply inbox, to know that what went before has arrived."""
    mine, replies = f"kvmesh.{role}.>", f"{reply_prefix(role)}.>"
    subscribe = (mine, replies)
    match role:
        case "router":
            return Rights((DISCOVER, "kvmesh.decode.>", mine, replies), (ANNOUNCE, *subscribe))
        case "decode":
            return Rights((ANNOUNCE, "kvmesh.prefill.>", "kvmesh.router.>", replies), (DISCOVER, *subscribe))
        case "prefill":
            return Rights((ANNOUNCE, "kvmesh.decode.>", replies), (DISCOVER, *subscribe))


def reply_prefix(user: str) -> str:
    """Where the answers to a user's requests go: a part of its own, so that no other role can read them."""
    return f"_INBOX_{user}" if user else "_INBOX"


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def check_name(setting: str, name: str) -> str:
    """`name` itself, where it can stand in a subject; `ConfigError` else."""
    if not _NAME.fullmatch(name):
        raise ConfigError(setting, name, "lower-case letters, digits and '-', 1 to 63 of them")
    return name


def inbox(role: Service, instance: InstanceRef) -> str:
    """The subject on which this start of the instance listens."""
    return f"kvmesh.{role}.{instance.name}.{instance.incarnation:016x}"
