"""`kvmesh fetch [MODEL]`: the model's directory, fetched first where it is not here yet; for whoever starts many at once."""

from __future__ import annotations

import argparse
import os
import sys

from shared.errors import ModelError
from shared.models.source import DEFAULT_MODEL, resolve


def main(argv: list[str]) -> None:
    """Prints the directory. Exit status 1, and one line, where it cannot be had."""
    parser = argparse.ArgumentParser(prog="kvmesh fetch", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=os.environ.get("KVMESH_MODEL") or DEFAULT_MODEL)
    try:
        print(resolve(parser.parse_args(argv).model))
    except ModelError as error:
        sys.exit(f"kvmesh fetch: {error}")
