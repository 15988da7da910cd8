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
    device = entry / "device"
    return read_device(device.resolve().name, root) if device.exists() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
