"""`kvmesh COMMAND`: each command is a module that is imported only when asked for."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "up": ("services.up.main", "a whole mesh on this machine: broker, router, prefillers, decoders"),
    "router": ("services.router.main", "the OpenAI-compatible front"),
    "prefill": ("services.prefill.main", "one prefill instance"),
    "decode": ("services.decode.main", "one decode instance"),
    "credentials": ("services.up.credentials", "certificates, users and rights for a broker that others can reach"),
    "key": ("services.router.new_key", "a new API key for the router"),
    "fetch": ("services.fetch", "the model's directory, fetched where it is not here yet"),
    "doctor": (
        "services.doctor.main",
        "whether this machine and its mesh are well, and from what length splitting pays",
    ),
    "probe": ("services.probe", "whether the service of this host lives, or is ready"),
    "settings": ("services.settings", "every setting with its default, as the README's table"),
}


def main() -> None:
    """Exit status 2 for an unknown command, as argparse does."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print("usage: kvmesh COMMAND [--help] [flags]\n")
        for name, (_, text) in COMMANDS.items():
            print(f"  {name:<12} {text}")
        return
    if command not in COMMANDS:
        print(f"kvmesh: no command {command!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    importlib.import_module(COMMANDS[command][0]).main(sys.argv[2:])


if __name__ == "__main__":
    main()
