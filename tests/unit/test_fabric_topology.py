"""Devices find their NICs and CPUs on recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.transfer.topology import (
    near_cpus,
    node_cpus,
    pair,
    parse_cpulist,
    read_device,
    read_nics,
)

RECORDED = Path(__file__).parent / "topologies"


def build(name: str, root: Path) -> Path:
    """A sysfs tree from its recording."""
    devices = root / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    for line in (RECORDED / f"{name}.txt").read_text().splitlines():
        kind, *fields = line.split()
        if kind == "pci":
            function = root / "devices" / fields[0]
            function.mkdir(parents=True)
            (function / "numa_node").write_text(f"{fields[1]}\n")
            (devices / function.name).symlink_to(function)
        elif kind in ("infiniband", "net"):
            entry = root / "class" / kind / fields[0]
            entry.mkdir(parents=True)
            if fields[1] != "-":
                (entry / "device").symlink_to((devices / fields[1]).resolve())
        elif kind == "node":
            node = root / "devices" / "system" / "node" / f"node{fields[0]}"
            node.mkdir(parents=True)
            (node / "cpulist").write_text(f"{fields[1]}\n")
    return root


@pytest.mark.parametrize(
    ("machine", "gpu", "nics", "first_cpu"),
    [
        ("dgx-h100", "0000:1b:00.0", ["mlx5_0"], 0),
        ("dgx-h100", "0000:9d:00.0", ["mlx5_6"], 56),
        ("p5-efa", "0000:53:00.0", ["rdmap79s0", "rdmap80s0"], 0),
        ("p5-efa", "0000:51:00.0", ["rdmap79s0", "rdmap80s0"], 0),
    ],
)
def test_a_gpu_finds_the_nics_of_its_switch(
    tmp_path: Path, machine: str, gpu: str, nics: list[str], first_cpu: int
) -> None:
    root = build(machine, tmp_path)
    device = read_device(gpu, root)
    assert device is not None
    near = pair(device, read_nics(root))
    assert [nic.name for nic in near] == nics
    assert near_cpus(near[0].pci, root)[0] == first_cpu
    assert len(near_cpus(near[0].pci, root)) in (112, 96)


def test_without_a_shared_bridge_the_numa_node_decides(tmp_path: Path) -> None:
    root = build("dgx-h100", tmp_path)
    device = read_device("0000:1b:00.0", root)
    assert device is not None
    others = [nic for nic in read_nics(root) if nic.name != "mlx5_0"]
    assert [nic.name for nic in pair(device, others)] == ["mlx5_1"]


def test_a_machine_without_numa_or_rdma(tmp_path: Path) -> None:
    root = build("small-vm", tmp_path)
    device = read_device("0000:00:01.0", root)
    assert device is not None
    assert device.numa_node is None
    [nic] = read_nics(root)
    assert (nic.name, nic.pci) == ("eth0", None)
    assert pair(device, [nic]) == [nic]
    assert near_cpus(device, root) == near_cpus(None, root) == []
    assert node_cpus(0, root) == []
    assert pair(device, []) == []


def test_what_is_not_there(tmp_path: Path) -> None:
    assert read_device("0000:00:00.0", tmp_path) is None
    assert read_nics(tmp_path) == []


@pytest.mark.parametrize(("text", "cpus"), [("0", [0]), ("0-2,8,10-11", [0, 1, 2, 8, 10, 11]), ("3,1", [3, 1])])
def test_the_kernels_cpu_lists(text: str, cpus: list[int]) -> None:
    assert parse_cpulist(text) == cpus


def test_this_machine_can_be_read() -> None:
    for nic in read_nics():
        assert nic.name != "lo"
        assert all(cpu >= 0 for cpu in near_cpus(nic.pci))
