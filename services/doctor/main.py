"""`kvmesh doctor`: whether this machine and the mesh that it belongs to are well, a line a finding.

It takes the settings of an instance of this machine (fabric, model, pool) and, where the broker knows roles, the router's user:
only that may hear what instances announce.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp

from services.doctor import host, mesh, reach
from services.doctor.break_even import Speeds, break_even
from services.doctor.findings import Finding, Value, as_json, as_text, exit_status
from shared import config
from shared.bus import Access, Bus
from shared.config import InstanceSettings
from shared.errors import BusError, ConfigError, FabricError, ModelError
from shared.messages import Announce
from shared.transfer.interface import Fabric
from shared.transfer.topology import SYSFS
from shared.whereabouts import settle

BROKER_S = 5.0
"""The broker must answer within."""

GRACE_S = 10.0
"""What ends in the event loop has ended so long after the deadline; what still runs hangs in a library."""


def main(argv: list[str] | None = None) -> None:
    """Prints the findings. Exit status 0: all well, perhaps with warnings; 1: something is wrong, or a setting is."""
    parser = argparse.ArgumentParser(prog="kvmesh doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="it ends within about so many seconds [60]")
    given = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(given):
        print(parser.format_help())
    own, rest = parser.parse_known_args(given)
    logging.basicConfig(level=logging.CRITICAL)
    try:
        if not 0 < own.deadline_s <= 3600:
            raise ConfigError("--deadline-s", own.deadline_s, "a number of more than 0 and at most 3600")
        faulthandler.dump_traceback_later(own.deadline_s + GRACE_S, exit=True)
        settings = settle(config.load(InstanceSettings, rest, os.environ, prog="kvmesh doctor"), "router")
    except ConfigError as error:
        findings = [Finding("fail", "settings", str(error))]
    else:
        findings = asyncio.run(examine(settings, own.deadline_s))
    faulthandler.cancel_dump_traceback_later()
    print((as_json if own.json else as_text)(findings))
    raise SystemExit(exit_status(findings))


async def examine(settings: InstanceSettings, deadline_s: float) -> list[Finding]:
    """Everything, in order; what the deadline cut off is a finding too."""
    findings: list[Finding] = []
    try:
        async with asyncio.timeout(deadline_s):
            usable = look_around(settings, findings)
            if usable:
                await _loopback(settings, findings)
            await _mesh(settings, findings, usable)
    except TimeoutError:
        todo = "what follows was not looked at; give more with --deadline-s"
        findings.append(Finding("fail", "deadline", f"not done within {deadline_s:g} s: {todo}"))
    return findings


def look_around(settings: InstanceSettings, findings: list[Finding]) -> bool:
    """This machine. Whether the fabric can be tried."""
    wanted = settings.fabric
    try:
        from shared.transfer.fabric import library_version, providers
    except ImportError as error:
        todo = "install libfabric (libfabric1) and kvmesh itself for this Python"
        findings.append(Finding("fail", "libfabric", f"the native module does not load ({error}): {todo}"))
        usable = False
    else:
        findings.append(host.judge_libfabric(library_version(), providers(), wanted))
        usable = findings[-1].level != "fail"
    try:
        layout = host.layout_of(settings)
        needed = None if layout is None else host.region_bytes(layout, settings)
    except (ModelError, ConfigError) as error:
        needed = None
        findings.append(Finding("fail", "model", f"{error}: no instance starts with it"))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    findings.append(host.judge_memlock(limit, needed, wanted))
    findings.append(host.judge_hugepages(SYSFS, wanted))
    findings.extend(host.judge_topology(SYSFS, wanted))
    return usable


async def _loopback(settings: InstanceSettings, findings: list[Finding]) -> None:
    from services.doctor.loopback import judge_loopback, measure

    try:
        found = await measure(settings.fabric, settings.fabric_host)
    except FabricError as error:
        todo = "see KVMESH_FABRIC and KVMESH_FABRIC_HOST; no instance starts with these"
        findings.append(Finding("fail", "loopback", f"{settings.fabric}: {error}; {todo}"))
    else:
        findings.append(judge_loopback(found, settings.fabric))


async def _mesh(settings: InstanceSettings, findings: list[Finding], usable: bool) -> None:
    what, todo = "broker", "start it, or set KVMESH_NATS_URL and what lets you in: see the settings of that name"
    try:
        async with Bus.connect(Access.of(settings), name="doctor", timeout_s=BROKER_S) as bus:
            times = await mesh.round_trips(bus)
            findings.append(mesh.judge_broker(times))
            what, todo = (
                "announcements",
                "use the router's KVMESH_NATS_USER and KVMESH_NATS_PASSWORD: others may not listen",
            )
            instances = await mesh.listen(bus, max(1.0, 2 * settings.heartbeat_s))
            malformed = bus.malformed
    except (BusError, ConfigError) as error:
        findings.append(Finding("fail", what, f"{error}; {todo}"))
        return
    findings.extend(mesh.judge_pairs(instances, malformed))
    reached = await _reach(settings, instances, findings, usable)
    findings.extend(judge_break_even(instances, reached, mesh.quantile(times, 0.5)))


async def _reach(
    settings: InstanceSettings, instances: Sequence[Announce], findings: list[Finding], usable: bool
) -> list[reach.Reached]:
    """Appends a finding each, in the order of `instances`. `usable`: the fabric here can be tried."""
    reached = []
    timeout = aiohttp.ClientTimeout(total=reach.TIMEOUT_S)
    async with AsyncExitStack() as stack:
        fabric = await _fabric(settings, stack) if usable else None
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        for instance in instances:
            reached.append(await reach.reach(instance, session, fabric))
            findings.append(reach.judge_reach(instance, reached[-1], settings.fabric))
    return reached


async def _fabric(settings: InstanceSettings, stack: AsyncExitStack) -> Fabric | None:
    """One to connect from; None where it does not open, which `loopback` has said."""
    from services.doctor.loopback import identity
    from shared.transfer.fabric import Fabric as Native

    try:
        return await stack.enter_async_context(
            await Native.open(provider=settings.fabric, host=settings.fabric_host, identity=identity())
        )
    except FabricError:
        return None


def judge_break_even(instances: Sequence[Announce], reached: Sequence[reach.Reached], hop_s: float) -> list[Finding]:
    """For each model: its speeds, and from what length on splitting pays. `hop_s`: one message through the broker."""
    by_model: dict[str, list[tuple[Announce, reach.Reached]]] = defaultdict(list)
    for instance, its in zip(instances, reached, strict=True):
        by_model[instance.model.digest].append((instance, its))
    return [_break_even_of(group, hop_s) for group in by_model.values()]


def _break_even_of(group: Sequence[tuple[Announce, reach.Reached]], hop_s: float) -> Finding:
    what = f"break-even {group[0][0].model.name}"
    loads = [announce.load for announce, _ in group]
    speeds = Speeds(
        prefill_tokens_per_s=mesh.measured([load.prefill_tokens_per_s for load in loads]),
        step_s=mesh.measured([load.step_s for load in loads]),
        exposed_s=reach.exposed_s(its.transfers for _, its in group),
        hop_s=hop_s,
    )
    numbers: dict[str, Value] = {name: getattr(speeds, name) for name in speeds.__struct_fields__}
    running = [announce.load.running for announce, _ in group if announce.role == "decode"]
    streams = sorted({1, max(running, default=1) or 1})
    found = [result for count in streams if (result := break_even(speeds, count)) is not None]
    if not found:
        text = f"not measured yet: {', '.join(speeds.missing)}; send the mesh some long prompts and ask again"
        return Finding("warn", what, text, numbers)
    numbers |= {f"tokens_at_{result.streams}_streams": result.tokens for result in found} | {"cost_s": found[0].cost_s}
    lengths = ", ".join(f"{result.tokens} tokens where {result.streams} decode" for result in found)
    text = (
        f"splitting pays from prompts of {lengths}; n = P (x + h + 1.5 s) / B with P = {speeds.prefill_tokens_per_s:.0f} "
        f"tokens/s, x = {_ms(speeds.exposed_s)} exposed transfer, h = {_ms(hop_s)} a message, s = {_ms(speeds.step_s)} a step, "
        f"B = {' and '.join(str(count) for count in streams)} decoding streams"
    )
    return Finding("ok", what, text, numbers)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms"
