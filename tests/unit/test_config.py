"""Settings come from flags and variables, are checked once, and a bad one is named."""

from __future__ import annotations

import pytest

from shared import config
from shared.errors import ConfigError
from shared.messages import InstanceRef
from shared.subjects import check_name, inbox


def load(argv=(), **environ):
    return config.load(config.DecodeSettings, list(argv), environ, prog="test")


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default():
    assert load().page_size == 64
    assert load(KVMESH_PAGE_SIZE="16").page_size == 16
    assert load(["--page-size", "32"], KVMESH_PAGE_SIZE="16").page_size == 32
    assert load(KVMESH_PAGE_SIZE="").page_size == 64


@pytest.mark.parametrize(
    ("variable", "value", "takes"),
    [
        ("KVMESH_PAGE_SIZE", "0", "a whole number of at least 1 and at most 1024"),
        ("KVMESH_PAGE_SIZE", "many", "a whole number of at least 1 and at most 1024"),
        ("KVMESH_PORT", "65536", "at most 65535"),
        ("KVMESH_LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        ("KVMESH_HEARTBEAT_S", "0", "a number of more than 0"),
        ("KVMESH_KV_DTYPE", "float16", "one of auto, float32, bfloat16"),
    ],
)
def test_a_bad_value_names_the_setting_and_what_it_takes(variable, value, takes):
    with pytest.raises(ConfigError, match=takes) as raised:
        load(**{variable: value})
    assert (raised.value.setting, raised.value.value) == (variable, value)


def test_every_setting_is_described():
    for kind in (config.RouterSettings, config.PrefillSettings, config.DecodeSettings):
        for info in config.describe(kind):
            assert info.help, f"{info.variable} has no description"
            assert info.variable == "KVMESH_" + info.name.upper()


def test_names_that_can_stand_in_a_subject():
    assert check_name("KVMESH_NAME", "decode-1") == "decode-1"
    for bad in ("", "Decode", "a.b", "a*", "-a", "x" * 64):
        with pytest.raises(ConfigError):
            check_name("KVMESH_NAME", bad)


def test_an_inbox_names_the_incarnation():
    assert inbox("decode", InstanceRef("d", 255)) == "kvmesh.decode.d.00000000000000ff"
