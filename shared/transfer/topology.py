"""Which NIC and which CPUs are near which device, from sysfs. Pure reading: a root can be given, so that recorded trees
of other machines are as good as this one.

A device's *path* is its chain of PCI bridges below the root complex, from /sys/bus/pci/devices/<address>'s real path.
Two devices are the closer, the longer the common part of their paths is; then it counts that they share a NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

SYSFS = Path("/sys")
NO_NODE = "-1"  # what the kernel says of a device on a machine without NUMA


class PciDevice(msgspec.Struct, frozen=True):
    """A PCI function: its address, the bridges above it from the root down, and its NUMA node (None: unknown)."""

    address: str
    path: tuple[str, ...]
    numa_node: int | None


class Nic(msgspec.Struct, frozen=True):
    """A network interface or RDMA device by name, with the PCI function behind it (None: virtual)."""

    name: str
    pci: PciDevice | None


class NicGroup(msgspec.Struct, frozen=True, kw_only=True):
    """NICs that are near each other and served by one progress thread, on those CPUs (none: anywhere). A NIC is the name of
    its device ("mlx5_0", "rdmap79s0", "eth0") or a numeric address of it. `device` and `numa_node`: what they are near."""

    nics: tuple[str, ...]
    cpus: tuple[int, ...] = ()
    device: str | None = None
    numa_node: int | None = None


def groups(devices: Iterable[str], root: Path = SYSFS) -> list[NicGroup]:
    """For each of these PCI functions (accelerators) the NICs closest to it. Devices whose closest NICs are the same share a
    group, which bears the first's name, so that a NIC is in one group only. Without devices, or where none has a PCI address
    here, one group of all NICs. Empty where there is no NIC."""
    nics = read_nics(root)
    found: dict[tuple[str, ...], NicGroup] = {}
    for device in filter(None, (read_device(address, root) for address in devices)):
        near = tuple(nic.name for nic in pair(device, nics))
        cpus = tuple(near_cpus(device, root))
        if near and near not in found:
            found[near] = NicGroup(nics=near, cpus=cpus, device=device.address, numa_node=device.numa_node)
    if not found and nics:
        nodes = {nic.pci.numa_node if nic.pci else None for nic in nics}
        node = nodes.pop() if len(nodes) == 1 else None
        cpus = () if node is None else tuple(node_cpus(node, root))
        return [NicGroup(nics=tuple(nic.name for nic in nics), cpus=cpus, numa_node=node)]
    return list(found.values())


def read_device(address: str, root: Path = SYSFS) -> PciDevice | None:
    """The PCI function at `address` ("0000:17:00.0"); None where there is none."""
    entry = root / "bus" / "pci" / "devices" / address
    if not entry.exists():
        return None
    real = entry.resolve()
    parts = real.parts
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts) - 1)
    node = _read(real / "numa_node")
    return PciDevice(address, parts[start:], None if node in (None, NO_NODE) else int(str(node)))


def read_nics(root: Path = SYSFS) -> list[Nic]:
    """RDMA devices where there are any, else network interfaces without the loopback; by name."""
    for kind in ("infiniband", "net"):
        folder = root / "class" / kind
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        nics = [Nic(name, _behind(folder / name, root)) for name in names if name != "lo"]
        if nics:
            return nics
    return []


def node_cpus(node: int, root: Path = SYSFS) -> list[int]:
    """The CPUs of a NUMA node; empty where there is no such node."""
    text = _read(root / "devices" / "system" / "node" / f"node{node}" / "cpulist")
    return parse_cpulist(text) if text else []


def parse_cpulist(text: str) -> list[int]:
    """The kernel's list format: "0-2,8,10-11"."""
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def closeness(device: PciDevice, other: PciDevice | None) -> tuple[int, bool]:
    """Orders pairs: (bridges in common, same NUMA node). Of nothing in common and no node known it is (0, False)."""
    if other is None:
        return 0, False
    common = 0
    for ours, theirs in zip(device.path, other.path, strict=False):
        if ours != theirs:
            break
        common += 1
    return common, device.numa_node is not None and device.numa_node == other.numa_node


def pair(device: PciDevice, nics: Iterable[Nic]) -> list[Nic]:
    """The NICs that are closest to `device`, all that are equally close, in the order given."""
    nics = list(nics)
    best = max((closeness(device, nic.pci) for nic in nics), default=None)
    return [nic for nic in nics if closeness(device, nic.pci) == best]


def near_cpus(device: PciDevice | None, root: Path = SYSFS) -> list[int]:
    """Where the progress thread of a NIC should run; empty: anywhere."""
    if device is None or device.numa_node is None:
        return []
    return node_cpus(device.numa_node, root)


def _behind(entry: Path, root: Path) -> PciDevice | None:
    """A virtio NIC's device is a child of its PCI function, so that the nearest function above counts."""
    device = entry / "device"
    if not device.exists():
        return None
    real = device.resolve()
    return next(filter(None, (read_device(part.name, root) for part in (real, *real.parents))), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
