"""Everything goes wrong, at random and under load, and no answer may be wrong, none hang, and no page be lost.

    python -m loadtest.chaos --minutes 2 --seed 1 [--model DIR] [--report FILE.json] [--logs DIR]

Starts a mesh of processes, as a stranger would, each in a network namespace of its own where root allows it; kills, freezes,
cuts off and drains its parts at random while clients of several kinds ask; compares every answer with what the model says when it
runs whole in one process. Prints a table. Exit status 1 where an answer was wrong or hung, or a page was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from loadtest.chaos.network import network
from loadtest.chaos.parts import NAMES, Deployment
from loadtest.chaos.reference import cases, random_model
from loadtest.chaos.run import Plan, chaos, end_of_logs
from loadtest.chaos.tally import Tally, table

PAGE_SIZE = 16
KV_TOKENS = 1024
"""A pool that fewer than three of the longest requests fill."""

REQUEST_TIMEOUT_S = 30.0


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _end)
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-chaos-"))
    try:
        tally = run(arguments, folder)
        print(table(tally))
        if arguments.report:
            Path(arguments.report).write_bytes(msgspec.json.format(msgspec.json.encode(tally), indent=2))
        if not tally.good:
            print(end_of_logs(folder), file=sys.stderr)
        raise SystemExit(not tally.good)
    finally:
        if arguments.logs:
            shutil.copytree(folder, arguments.logs, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def run(arguments: argparse.Namespace, folder: Path) -> Tally:
    model = Path(arguments.model) if arguments.model else random_model(folder / "model")
    known = cases(model, PAGE_SIZE)
    plan = Plan(arguments.seed, arguments.minutes * 60, clients=arguments.clients, every_s=arguments.every)
    with network(NAMES) as net:
        deployment = Deployment(model, folder, net, PAGE_SIZE, KV_TOKENS, REQUEST_TIMEOUT_S)
        return asyncio.run(chaos(plan, known, deployment))


def _end(number: int, _: object) -> None:
    """As an exception, so that parts and namespaces are cleared away."""
    raise SystemExit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=1, help="of faults and clients")
    parser.add_argument("--model", default="", help="a model's directory; default: a small random one")
    parser.add_argument("--clients", type=int, default=32, help="that ask at once")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two faults, on average")
    parser.add_argument("--report", default="", help="where the JSON goes")
    parser.add_argument("--logs", default="", help="where the parts' logs go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
