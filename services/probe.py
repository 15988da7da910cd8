"""`kvmesh probe [live|ready]`: asks the service of this container or host, found by its own settings, how it is.

Exit status 0 where it says yes, 1 where it says no, or nothing within the time.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys

from shared import config
from shared.config import RouterSettings
from shared.errors import ConfigError
from shared.whereabouts import settle

PATHS = {"live": "/health", "ready": "/ready"}


def main(argv: list[str]) -> None:
    """Prints what it says."""
    parser = argparse.ArgumentParser(prog="kvmesh probe", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=PATHS, default="ready")
    parser.add_argument("--timeout-s", type=float, default=2.0)
    arguments = parser.parse_args(argv)
    try:
        host, port = _where()
    except ConfigError as error:
        sys.exit(f"kvmesh probe: {error}")
    connection = http.client.HTTPConnection(host, port, timeout=arguments.timeout_s)
    try:
        connection.request("GET", PATHS[arguments.what])
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"kvmesh probe: {host}:{port} does not answer: {error}")
    if answer.status != 200:
        sys.exit(f"kvmesh probe: {answer.status} {text}")
    print(text)


def _where() -> tuple[str, int]:
    """Host and port of the service; the router's default port where none is set. Raises `ConfigError`."""
    settings = settle(config.load(RouterSettings, [], os.environ, prog="kvmesh probe"), "router")
    return "127.0.0.1" if settings.host == "0.0.0.0" else settings.host, settings.port
