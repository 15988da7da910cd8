"""What a local mesh consists of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services import settings as settings_module
from services.up.parts import UpSettings, plan, threads_each
from shared.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_names_ports_and_threads():
    parts = plan(UpSettings(prefillers=1, decoders=2, port=8123), 8, {})
    assert [part.name for part in parts] == ["router", "decode-1", "decode-2", "prefill"]
    assert parts[0].environment["KVMESH_PORT"] == "8123"
    assert [part.environment.get("KVMESH_THREADS") for part in parts] == [None, "2", "2", "4"]
    assert parts[1].argv == [sys.executable, "-m", "services.decode"]


def test_threads_that_were_given_stand():
    parts = plan(UpSettings(), 8, {"KVMESH_THREADS": "3"})
    assert {part.environment.get("KVMESH_THREADS") for part in parts} == {None, "3"}


def test_ranks_go_to_the_side_they_are_for_and_share_its_cores():
    parts = plan(UpSettings(prefill_tp=4, decoders=1, decode_tp=2, decode_dp=2), 16, {})
    told = {part.name: part.environment for part in parts}
    assert (told["prefill"]["KVMESH_TP"], told["prefill"]["KVMESH_THREADS"]) == ("4", "2")
    assert "KVMESH_DP" not in told["prefill"]
    assert (told["decode"]["KVMESH_TP"], told["decode"]["KVMESH_DP"], told["decode"]["KVMESH_THREADS"]) == (
        "2",
        "2",
        "2",
    )
    assert "KVMESH_TP" not in told["router"]


@pytest.mark.parametrize(("name", "instead"), [("KVMESH_TP", "KVMESH_PREFILL_TP"), ("KVMESH_DP", "KVMESH_DECODE_DP")])
def test_ranks_of_no_side_are_refused(name, instead):
    with pytest.raises(ConfigError, match=f"{name}='2': takes nothing in kvmesh up, which has {instead}"):
        plan(UpSettings(), 8, {name: "2"})


@pytest.mark.parametrize(
    ("cores", "prefillers", "decoders", "each"),
    [(1, 1, 1, (1, 1)), (2, 1, 2, (1, 1)), (8, 2, 4, (2, 1)), (64, 1, 1, (32, 32)), (3, 1, 1, (1, 2))],
)
def test_cores_are_shared_out(cores, prefillers, decoders, each):
    assert threads_each(cores, prefillers, decoders) == each


def test_the_readme_has_the_table_of_settings(capsys):
    settings_module.main([])
    assert capsys.readouterr().out.strip() in (ROOT / "README.md").read_text()


def test_an_unknown_command_names_those_there_are():
    done = subprocess.run([sys.executable, "-m", "services.cli", "fly"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "up, router, prefill, decode" in done.stderr


@pytest.mark.parametrize("command", ["router", "prefill", "decode", "up"])
def test_a_bad_setting_is_one_line(command):
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", command, "--port", "70000"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr == f"kvmesh {command}: KVMESH_PORT='70000': takes a whole number of at least 0 and at most 65535\n"
    )
