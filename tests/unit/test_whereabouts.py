"""What a process finds out about itself where it is one of many alike."""

from __future__ import annotations

import socket

import pytest

from shared.config import DecodeSettings, RouterSettings
from shared.errors import ConfigError
from shared.subjects import check_name
from shared.whereabouts import own_address, settle


def test_without_auto_nothing_changes_but_the_name() -> None:
    settled = settle(DecodeSettings(), "decode")
    assert settled == DecodeSettings(name="decode")
    assert settle(DecodeSettings(name="mine"), "decode").name == "mine"


def test_auto_is_the_address_towards_the_broker() -> None:
    settled = settle(DecodeSettings(host="auto", fabric_host="auto", nats_url="nats://127.0.0.1:4222"), "decode")
    assert (settled.host, settled.fabric_host) == ("127.0.0.1", "127.0.0.1")
    assert settle(RouterSettings(host="auto"), "router").host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("box", "decode-box"),
        ("4F0a.example.COM", "decode-4f0a-example-com"),
        ("-_-", "decode"),
        ("x" * 80, "decode-" + "x" * 56),
    ],
)
def test_a_name_of_role_and_host_can_stand_in_a_subject(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    settled = settle(DecodeSettings(name="auto"), "decode")
    assert settled.name == check_name("KVMESH_NAME", settled.name) == name


@pytest.mark.parametrize("url", ["nats://no-such-host.invalid:4222", "nonsense", "nats://host:port"])
def test_where_there_is_no_way_to_the_broker_the_setting_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"KVMESH_HOST='auto': takes an address"):
        own_address("KVMESH_HOST", url)
