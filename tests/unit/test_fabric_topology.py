"""Devices find their NICs and CPUs on recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.transfer.topology import (
    NicGroup,
    groups,
    near_cpus,
    node_cpus,
    pair,
    parse_cpulist,
    read_device,
    read_nics,
)
from tests.record_sysfs import materialise, record

RECORDED = Path(__file__).parent / "topologies"


def build(name: str, root: Path) -> Path:
    return materialise((RECORDED / f"{name}.txt").read_text(), root)


DGX_NICS = {
    "1b": "mlx5_0",
    "43": "mlx5_3",
    "52": "mlx5_4",
    "61": "mlx5_5",
    "9d": "mlx5_6",
    "c3": "mlx5_9",
    "d1": "mlx5_10",
    "df": "mlx5_11",
}
DGX_GPUS = [f"0000:{bus}:00.0" for bus in DGX_NICS]
P5_GPUS = [f"0000:{0x53 + 0x11 * i:02x}:00.0" for i in range(8)]


def test_each_gpu_of_a_connectx_node_has_the_nic_of_its_switch(tmp_path: Path) -> None:
    found = groups(DGX_GPUS, build("dgx-h100", tmp_path))
    assert [(group.device, group.nics) for group in found] == [
        (gpu, (nic,)) for gpu, nic in zip(DGX_GPUS, DGX_NICS.values(), strict=True)
    ]
    assert [group.numa_node for group in found] == [0] * 4 + [1] * 4
    assert found[0].cpus == (*range(56), *range(112, 168))
    assert found[7].cpus == (*range(56, 112), *range(168, 224))


def test_each_gpu_of_an_efa_node_has_four_nics(tmp_path: Path) -> None:
    root = build("p5-efa", tmp_path)
    assert len(read_nics(root)) == 32
    found = groups(P5_GPUS, root)
    assert [set(group.nics) for group in found] == [
        {f"rdmap{0x4F + 0x11 * i + k}s0" for k in range(4)} for i in range(8)
    ]
    assert [group.numa_node for group in found] == [0] * 4 + [1] * 4
    assert {len(group.cpus) for group in found} == {96}
    assert (found[0].cpus[0], found[4].cpus[0]) == (0, 48)


def test_without_a_shared_bridge_the_numa_node_decides(tmp_path: Path) -> None:
    root = build("dgx-h100", tmp_path)
    device = read_device("0000:1b:00.0", root)
    assert device is not None
    others = [nic for nic in read_nics(root) if nic.name in ("mlx5_1", "mlx5_2", "mlx5_7")]
    assert [nic.name for nic in pair(device, others)] == ["mlx5_1", "mlx5_2"]


def test_gpus_that_share_their_nics_share_a_group(tmp_path: Path) -> None:
    root = build("small-vm", tmp_path)
    [group] = groups(["0000:00:01.0", "0000:00:02.0"], root)
    assert group.device == "0000:00:01.0"


def test_a_machine_without_rdma(tmp_path: Path) -> None:
    """One group of all interfaces; the virtio NIC is its PCI function's, the others have none."""
    root = build("small-vm", tmp_path)
    nics = {nic.name: nic.pci.address if nic.pci else None for nic in read_nics(root)}
    assert nics == {"eth0": "0000:00:03.0", "ifb0": None, "ifb1": None}
    for devices in ([], ["0000:99:00.0"]):
        [group] = groups(devices, root)
        assert (group.nics, group.cpus, group.numa_node) == (("eth0", "ifb0", "ifb1"), (), None)
    device = read_device("0000:00:03.0", root)
    assert device is not None
    assert near_cpus(device, root) == near_cpus(None, root) == []
    assert node_cpus(0, root) == [0, 1]
    assert node_cpus(1, root) == []
    assert pair(device, []) == []


def test_a_machine_without_a_pci_nic_has_one_group(tmp_path: Path) -> None:
    tree = "class/net/veth0 -> devices/virtual/net/veth0\nclass/net/lo -> devices/virtual/net/lo\n"
    assert groups(["0000:1b:00.0"], materialise(tree, tmp_path)) == [NicGroup(nics=("veth0",))]


@pytest.mark.parametrize("name", ["dgx-h100", "p5-efa", "small-vm"])
def test_what_is_recorded_is_the_tree(name: str, tmp_path: Path) -> None:
    text = (RECORDED / f"{name}.txt").read_text()
    lines = {line for line in text.splitlines() if not line.startswith("#")}
    assert set(record(materialise(text, tmp_path))) == lines


def test_what_is_not_there(tmp_path: Path) -> None:
    assert read_device("0000:00:00.0", tmp_path) is None
    assert read_nics(tmp_path) == []
    assert groups(["0000:00:00.0"], tmp_path) == groups([], tmp_path) == []


@pytest.mark.parametrize(("text", "cpus"), [("0", [0]), ("0-2,8,10-11", [0, 1, 2, 8, 10, 11]), ("3,1", [3, 1])])
def test_the_kernels_cpu_lists(text: str, cpus: list[int]) -> None:
    assert parse_cpulist(text) == cpus


def test_this_machine_can_be_read() -> None:
    for nic in read_nics():
        assert nic.name != "lo"
        assert all(cpu >= 0 for cpu in near_cpus(nic.pci))
