"""Records what `shared.transfer.topology` reads of a machine's sysfs, and makes a tree of such a recording.

    python -m tests.record_sysfs > tests/unit/topologies/<machine>.txt

A recording is one text file: `path -> target` is a symbolic link, `path = content` a file of one line; paths are relative to
/sys, comments begin with #. Nothing of it identifies the machine beyond bus addresses and device names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path


def record(root: Path = Path("/sys")) -> Iterator[str]:
    """The lines of a recording."""
    for entry in sorted((root / "bus" / "pci" / "devices").glob("*")):
        real = entry.resolve()
        yield f"{_under(entry, root)} -> {_under(real, root.resolve())}"
        node = real / "numa_node"
        if node.exists():
            yield f"{_under(node, root.resolve())} = {node.read_text().strip()}"
    for kind in ("infiniband", "net"):
        for entry in sorted((root / "class" / kind).glob("*")):
            if not entry.is_dir():
                continue
            real = entry.resolve()
            yield f"{_under(entry, root)} -> {_under(real, root.resolve())}"
            if (real / "device").exists():
                yield f"{_under(real, root.resolve())}/device -> {_under((real / 'device').resolve(), root.resolve())}"
    for node in sorted((root / "devices" / "system" / "node").glob("node[0-9]*")):
        yield f"{_under(node, root)}/cpulist = {(node / 'cpulist').read_text().strip()}"


def materialise(recording: str, root: Path) -> Path:
    """The tree under `root`, which is returned."""
    for line in recording.splitlines():
        if not line or line.startswith("#"):
            continue
        if " -> " in line:
            path, target = line.split(" -> ")
            (root / target).mkdir(parents=True, exist_ok=True)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(root / target)
        else:
            path, content = line.split(" = ")
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content + "\n")
    return root


def _under(path: Path, root: Path) -> str:
    return str(path.relative_to(root))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in record())
