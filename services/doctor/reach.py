"""One instance, as it is reached from here: its HTTP port, its fabric's control port, what it counted so far.

How fast KV moves to it is not measured: it takes writes only where it has given an attempt leave to write, and none is given to a
doctor. What the instances themselves have measured on real transfers is read from their /metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from urllib.parse import urlsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from services.doctor.findings import Finding, Value
from services.doctor.mesh import quantile
from shared.errors import FabricError
from shared.messages import Announce
from shared.transfer.interface import Fabric

ROUND_TRIPS = 20
CONNECTS = 5
TIMEOUT_S = 2.0
"""Of each thing that is asked of an instance."""

MOST_METRICS_BYTES = 4 << 20


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Of all attempts of prefillers since their start. `busy_s`: at least one write was in flight; `exposed_s`: the sum, over
    `count` attempts, of what remained after the last forward."""

    bytes: float
    busy_s: float
    exposed_s: float
    count: float


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `error` is why HTTP did not answer, `fabric_error` why there is no `fabric_connect_s`."""

    tcp_connect_s: float | None = None
    http_p50_s: float | None = None
    http_p99_s: float | None = None
    fabric_connect_s: float | None = None
    transfers: Transfers | None = None
    error: str | None = None
    fabric_error: str | None = None


async def reach(instance: Announce, session: aiohttp.ClientSession, fabric: Fabric | None) -> Reached:
    """One after another, so that nothing disturbs what is measured. `fabric` None: there is none here to connect from."""
    connected: float | None = None
    fabric_error: str | None = None
    try:
        connected = await _fabric_connect(instance, fabric)
    except FabricError as error:
        fabric_error = str(error)
    try:
        async with asyncio.timeout(3 * TIMEOUT_S):
            tcp = await _tcp_connect(instance.http)
            times = await _http(session, instance.http)
            transfers = await _transfers(session, instance.http) if instance.role == "prefill" else None
    except (OSError, aiohttp.ClientError, ValueError, TimeoutError) as error:
        said = str(error) or "no answer in time"
        return Reached(fabric_connect_s=connected, fabric_error=fabric_error, error=f"{instance.http}: {said}")
    return Reached(
        tcp_connect_s=tcp,
        http_p50_s=quantile(times, 0.5),
        http_p99_s=quantile(times, 0.99),
        fabric_connect_s=connected,
        fabric_error=fabric_error,
        transfers=transfers,
    )


async def _fabric_connect(instance: Announce, fabric: Fabric | None) -> float | None:
    """Seconds of a handshake over its control port, with the endpoints of all NICs. When the connection ends, a decoder fences
    this identity and counts it (`kvmesh_fenced_peers`), as it does any peer's. None where none is to be had: another provider,
    or shm, whose locks a doctor should not share."""
    if fabric is None or fabric.provider == "shm" or fabric.provider != instance.fabric.provider:
        return None
    begin = perf_counter()
    await fabric.connect(instance.fabric.address, timeout_s=TIMEOUT_S)
    return perf_counter() - begin


async def _tcp_connect(url: str) -> float:
    """The median, seconds: one round trip of the network and the two kernels."""
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise ValueError("no http://HOST:PORT")
    times = []
    for _ in range(CONNECTS):
        begin = perf_counter()
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        times.append(perf_counter() - begin)
        writer.close()
        await writer.wait_closed()
    return quantile(times, 0.5)


async def _http(session: aiohttp.ClientSession, url: str) -> list[float]:
    """Seconds of GET /health on one connection; the first, which makes the connection, does not count."""
    times = []
    for _ in range(ROUND_TRIPS + 1):
        begin = perf_counter()
        async with session.get(f"{url}/health") as answer:
            answer.raise_for_status()
            await answer.read()
        times.append(perf_counter() - begin)
    return times[1:]


async def _transfers(session: aiohttp.ClientSession, url: str) -> Transfers | None:
    async with session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        text = await answer.content.read(MOST_METRICS_BYTES)
        while part := await answer.content.read(MOST_METRICS_BYTES):
            text += part
            if len(text) > MOST_METRICS_BYTES:
                raise ValueError(f"/metrics is longer than {MOST_METRICS_BYTES} bytes")
    return read_transfers(text.decode(errors="replace"))


def read_transfers(text: str) -> Transfers | None:
    """From a prefiller's /metrics. None before its first transfer. Raises `ValueError` for what is no metrics."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    count = samples.get("kvmesh_transfer_exposed_seconds_count", 0.0)
    if not count:
        return None
    return Transfers(
        bytes=samples.get("kvmesh_transfer_bytes_total", 0.0),
        busy_s=samples.get("kvmesh_transfer_seconds_sum", 0.0),
        exposed_s=samples["kvmesh_transfer_exposed_seconds_sum"],
        count=count,
    )


def exposed_s(all_transfers: Iterable[Transfers | None]) -> float | None:
    """The mean over all attempts of all prefillers; None where there was none."""
    known = [transfers for transfers in all_transfers if transfers is not None]
    count = sum(transfers.count for transfers in known)
    return sum(transfers.exposed_s for transfers in known) / count if count else None


def judge_reach(instance: Announce, reached: Reached, provider: str) -> Finding:
    """`provider`: of the fabric here."""
    what = f"{instance.role} {instance.instance.name}"
    numbers: dict[str, Value] = {
        name: getattr(reached, name) for name in ("tcp_connect_s", "http_p50_s", "http_p99_s", "fabric_connect_s")
    }
    numbers |= {"state": instance.state, "write_bandwidth_bytes_per_s": None}
    if reached.error is not None:
        todo = "set its KVMESH_HOST to an address that others reach (auto), or open the port"
        return Finding("fail", what, f"{reached.error}; {todo}", numbers)
    assert reached.tcp_connect_s is not None
    assert reached.http_p50_s is not None
    said = f"TCP connect {reached.tcp_connect_s * 1e3:.2f} ms, HTTP {reached.http_p50_s * 1e3:.2f} ms p50"
    if reached.fabric_error is not None:
        todo = "set KVMESH_FABRIC_HOST, there and here, to an address that the others reach (auto), or open the ports"
        return Finding("fail", what, f"{said}; no fabric connection: {reached.fabric_error}; {todo}", numbers)
    if reached.transfers is not None and reached.transfers.busy_s > 0:
        rate = reached.transfers.bytes / reached.transfers.busy_s
        numbers |= {"served_bytes_per_s": rate, "transfers": reached.transfers.count}
        said += f"; wrote {rate / 1e6:.0f} MB/s on {reached.transfers.count:.0f} real transfers, under compute"
    if reached.fabric_connect_s is not None:
        said += f"; fabric handshake {reached.fabric_connect_s * 1e3:.1f} ms"
    elif instance.fabric.provider != provider:
        todo = "run the doctor with KVMESH_FABRIC set to that"
        return Finding("warn", what, f"{said}; its fabric is {instance.fabric.provider!r}, not tried: {todo}", numbers)
    else:
        said += "; fabric not tried"
    if instance.state != "ready":
        return Finding("warn", what, f"{said}; it is {instance.state}: wait for it, or start another", numbers)
    return Finding("ok", what, said, numbers)
