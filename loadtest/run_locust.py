"""Locust against a mesh of its own on this machine.

python -m loadtest.run_locust [--model DIR] [--html report/load.html] [Locust's flags ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from loadtest.local import local_mesh

LOCUSTFILE = Path(__file__).parent / "locustfile.py"


def main() -> None:
    """Exit status: Locust's."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.run_locust", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what the mesh serves")
    parser.add_argument("--html", default="report/load.html", help="where the report goes")
    arguments, rest = parser.parse_known_args()
    with local_mesh("--model", arguments.model) as mesh:
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", mesh.url, "--headless"]
        status = subprocess.call([*command, "--html", arguments.html, *rest])
    print(f"report: {arguments.html}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
