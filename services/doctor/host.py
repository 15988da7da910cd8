"""This machine: libfabric, locked memory, huge pages, NICs. Reads; opens nothing."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

from services.doctor.findings import Finding, Value
from shared.config import InstanceSettings, proposer
from shared.errors import ModelError
from shared.kv.shards import shard_layout
from shared.layout import KvLayout
from shared.models.config import load_config
from shared.transfer import topology

MIB = 1 << 20


def pins(provider: str) -> bool:
    """Whether a region's memory is locked for a NIC."""
    return provider.removeprefix("libfabric:").startswith(("verbs", "efa"))


def judge_libfabric(version: str, providers: Sequence[str], wanted: str) -> Finding:
    """`version`: "1.17". `providers` as `Fabric.open` takes them. Whether `wanted` opens is for the benchmark to say."""
    numbers = {"version": version, "providers": ", ".join(providers)}
    major, minor = (int(part) for part in version.split(".")[:2])
    said = f"libfabric {version} with {', '.join(providers) or 'no provider'}"
    if not any(name == wanted or name.startswith(f"{wanted};") for name in providers):
        todo = "install the provider or its device's driver, or set KVMESH_FABRIC to one of these"
        return Finding("fail", "libfabric", f"{said}: KVMESH_FABRIC={wanted} is not there; {todo}", numbers)
    if wanted == "shm" and major >= 2:
        return Finding("fail", "libfabric", f"{said}: its shm cannot be closed safely; set KVMESH_FABRIC=tcp", numbers)
    if "efa" in wanted and (major, minor) < (1, 18):
        todo = "install libfabric 1.18 or newer (1.22 is better)"
        return Finding("warn", "libfabric", f"{said}: it only emulates remote writes on efa; {todo}", numbers)
    return Finding("ok", "libfabric", said, numbers)


def layout_of(settings: InstanceSettings) -> KvLayout | None:
    """Of the configured model and its drafter, where they are directories here: nothing is fetched. None: unknown. Raises
    `ModelError` and `ConfigError`."""
    directory = Path(settings.model)
    if not (directory / "config.json").is_file():
        return None
    config, proposing = load_config(directory), proposer(settings)
    dtype = config.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    draft = None
    if proposing.kind == "draft":
        if not (Path(proposing.model) / "config.json").is_file():
            return None
        draft = load_config(Path(proposing.model))
    return config.layout(page_size=settings.page_size, dtype=dtype, mtp=proposing.kind == "mtp", draft=draft)


def region_bytes(layout: KvLayout, settings: InstanceSettings) -> int:
    """Of one rank. Raises `ModelError` where tensor parallel does not divide the heads."""
    try:
        sharded = shard_layout(layout, settings.tp)
    except ValueError as error:
        raise ModelError(str(error)) from None
    return sharded.region_bytes(settings.kv_tokens // layout.page_size)


def judge_memlock(limit: int, needed: int | None, provider: str) -> Finding:
    """`limit`: bytes that this process may lock, `resource.RLIM_INFINITY` for all. `needed`: of the regions that one instance
    registers, None where the model is unknown."""
    unlimited = limit == resource.RLIM_INFINITY
    numbers: dict[str, Value] = {
        "limit_bytes": None if unlimited else limit,
        "unlimited": unlimited,
        "region_bytes": needed,
    }
    has = "unlimited" if unlimited else f"{limit / MIB:.0f} MiB"
    wants = "unknown" if needed is None else f"{needed / MIB:.0f} MiB"
    if not pins(provider):
        return Finding("ok", "memlock", f"{has}; {provider} locks nothing (the KV regions here: {wants})", numbers)
    if unlimited or (needed is not None and limit >= needed):
        return Finding("ok", "memlock", f"{has}, the KV regions need {wants}", numbers)
    if needed is None:
        todo = "name the model's directory in KVMESH_MODEL to know, or set ulimit -l unlimited"
        return Finding("warn", "memlock", f"{has}, and what the KV regions need is unknown: {todo}", numbers)
    todo = f"set ulimit -l to {-(-needed // 1024)} or unlimited (LimitMEMLOCK=, --ulimit memlock=-1)"
    return Finding("fail", "memlock", f"{has}, and {provider} must lock {wants} of KV: {todo}", numbers)


def judge_hugepages(root: Path, provider: str) -> Finding:
    """A region is a memfd: it gets huge pages as shmem does, by the kernel's policy for that. `root`: of sysfs."""
    path = root / "kernel" / "mm" / "transparent_hugepage" / "shmem_enabled"
    try:
        text = path.read_text()
    except OSError:
        text = ""
    policy = text.partition("[")[2].partition("]")[0] or "unknown"
    numbers = {"shmem_policy": policy}
    if policy in ("always", "within_size", "force") or not pins(provider):
        return Finding("ok", "hugepages", f"for shared memory: {policy}", numbers)
    todo = f"echo within_size > {path} gives the NIC fewer pages to translate"
    return Finding("warn", "hugepages", f"for shared memory: {policy}; {todo}", numbers)


def judge_topology(root: Path, provider: str) -> list[Finding]:
    """NUMA nodes and NICs, and for a provider that needs an RDMA device whether there is one. `root`: of sysfs."""
    folder = root / "devices" / "system" / "node"
    nodes = sorted(int(entry.name[4:]) for entry in folder.glob("node[0-9]*")) if folder.is_dir() else []
    cpus = {node: topology.node_cpus(node, root) for node in nodes}
    numa = "; ".join(f"node {node}: {len(cpus[node])} CPUs" for node in nodes) or "the kernel tells no NUMA nodes"
    findings = [Finding("ok", "numa", numa, {"nodes": len(nodes)})]
    rdma = root / "class" / "infiniband"
    if pins(provider) and not (rdma.is_dir() and any(rdma.iterdir())):
        todo = "load the NIC's driver, or set KVMESH_FABRIC=tcp"
        return [*findings, Finding("fail", "nics", f"{provider} needs an RDMA device and there is none: {todo}")]
    nics = topology.read_nics(root)
    if not nics:
        return [*findings, Finding("warn", "nics", "only the loopback: other machines cannot be reached; add a NIC")]
    named = [f"{nic.name} ({_place(nic)})" for nic in nics]
    return [*findings, Finding("ok", "nics", ", ".join(named), {"nics": len(nics)})]


def _place(nic: topology.Nic) -> str:
    if nic.pci is None:
        return "virtual"
    return nic.pci.address if nic.pci.numa_node is None else f"{nic.pci.address}, NUMA node {nic.pci.numa_node}"
