"""`kvmesh settings`: the README's table, printed from the settings' structs."""

from __future__ import annotations

from services.up.parts import UpSettings
from shared import config

KINDS: dict[str, type[config.Settings]] = {
    "Every process": config.Settings,
    "router": config.RouterSettings,
    "prefill and decode": config.InstanceSettings,
    "prefill": config.PrefillSettings,
    "decode": config.DecodeSettings,
    "up": UpSettings,
}


def table(title: str, kind: type[config.Settings], known: set[tuple[str, object]]) -> list[str]:
    """Markdown rows of the settings that no kind above has with the same default."""
    rows = [f"| **{title}** | | |"]
    for info in config.describe(kind):
        if (info.name, info.default) not in known:
            known.add((info.name, info.default))
            rows.append(f"| `{info.variable}` | `{info.default!r}` | {info.help} |")
    return rows


def main(argv: list[str]) -> None:
    """Prints the table."""
    known: set[tuple[str, object]] = set()
    print("| variable | default | what it is |\n| --- | --- | --- |")
    for title, kind in KINDS.items():
        print("\n".join(table(title, kind, known)))
