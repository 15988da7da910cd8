"""How much of the KV transfer hides behind the prefill that makes it.

    python -m loadtest.bench_overlap [--lengths 256,512,1024,2048,4096] [--repeats 5]

For each prompt length, from the mesh's own traces: the time of its forwards, the time in which writes were in flight, the part
of that under a forward (hidden), and the time from the end of the last forward to the last write's completion (exposed). Beside
it the time to first token through the mesh, over HTTP, and of the same engine run whole in one process with as many threads.
Medians; mesh and whole alternate. Prints a table and writes report/bench_overlap.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import platform
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from loadtest.local import local_mesh
from loadtest.otlp import ReceivedSpan, Receiver, receiver

MODEL = "smollm2-135m-instruct"
SPANS = {"prefill.chunk", "kv.transfer", "decode.wait_kv", "decode.first_step", "router.request"}


class Sample(msgspec.Struct, frozen=True):
    """Seconds, bytes, and shares of 1."""

    forward_s: float
    transfer_s: float
    hidden: float
    exposed_s: float
    bytes: int
    ttft_mesh_s: float
    ttft_whole_s: float


class Row(msgspec.Struct, frozen=True):
    """Medians over the samples of one prompt length."""

    tokens: int
    samples: int
    forward_s: float
    transfer_s: float
    hidden: float
    exposed_s: float
    exposed_of_ttft: float
    megabytes: float
    ttft_mesh_s: float
    ttft_whole_s: float
    ttft_ratio: float


def main() -> None:
    arguments = _arguments()
    lengths = [int(n) for n in arguments.lengths.split(",")]
    with (
        receiver() as traces,
        local_mesh("--decoders", "1", "--model", MODEL, environment=_environment(arguments, traces)) as mesh,
        whole_engine(arguments.threads) as whole,
    ):
        rows = [measure(n, arguments.repeats, mesh.url, traces, whole) for n in lengths]
    print(table(rows))
    _write(rows, arguments)


def measure(tokens: int, repeats: int, url: str, traces: Receiver, whole: Callable[[list[int]], float]) -> Row:
    """One warm-up, then `repeats` samples of prompts of `tokens` + 1 tokens, so that `tokens` are prefilled."""
    draw = random.Random(tokens)
    samples = []
    for number in range(repeats + 1):
        prompt = draw.choices(range(1000, 40000), k=tokens + 1)
        sample = _sample(prompt, url, traces, whole)
        if number:
            samples.append(sample)
    return _row(tokens, samples)


def _sample(prompt: list[int], url: str, traces: Receiver, whole: Callable[[list[int]], float]) -> Sample:
    trace_id = secrets.token_hex(16)
    ttft_mesh = first_token(url, prompt, trace_id)
    spans = traces.wait_for(trace_id, SPANS)
    transfer = _one(spans, "kv.transfer")
    return Sample(
        sum(span.seconds for span in spans if span.name == "prefill.chunk"),
        _number(transfer, "kvmesh.transfer_s"),
        _number(transfer, "kvmesh.hidden_ratio"),
        _number(transfer, "kvmesh.exposed_s"),
        int(_number(transfer, "kvmesh.bytes")),
        ttft_mesh,
        whole(prompt),
    )


def first_token(url: str, prompt: list[int], trace_id: str) -> float:
    """Seconds from sending the request to the first event that carries a token."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"the mesh answered {answer.status}: {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
            took = time.perf_counter() - began
            answer.read()
            connection.close()
            return took
    raise RuntimeError("the stream ended without a token")


@contextmanager
def whole_engine(threads: int) -> Iterator[Callable[[list[int]], float]]:
    """The engine in one process: prompt → seconds until its first token."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run_whole, args=(theirs, threads), daemon=True)
    process.start()
    theirs.close()

    def ask(prompt: list[int]) -> float:
        ours.send(prompt)
        seconds: float = ours.recv()
        return seconds

    try:
        ask([1, 2, 3])
        yield ask
    finally:
        ours.close()
        process.terminate()
        process.join()


def _run_whole(requests: Connection, threads: int) -> None:
    import torch

    from shared.engine.whole import Whole, WholeConfig
    from shared.models.model import ModelOptions
    from shared.models.source import resolve

    torch.set_num_threads(threads)
    config = WholeConfig(options=ModelOptions(threads=threads), kv_dtype="bfloat16", page_size=64, chunk_tokens=512)
    engine = Whole(resolve(MODEL), config)
    while True:
        try:
            prompt = requests.recv()
        except EOFError:
            return
        began = time.perf_counter()
        engine.generate([prompt], 1)
        requests.send(time.perf_counter() - began)


def _row(tokens: int, samples: list[Sample]) -> Row:
    def median(of: Callable[[Sample], float]) -> float:
        return statistics.median(of(sample) for sample in samples)

    return Row(
        tokens=tokens,
        samples=len(samples),
        forward_s=median(lambda s: s.forward_s),
        transfer_s=median(lambda s: s.transfer_s),
        hidden=median(lambda s: s.hidden),
        exposed_s=median(lambda s: s.exposed_s),
        exposed_of_ttft=median(lambda s: s.exposed_s / s.ttft_mesh_s),
        megabytes=median(lambda s: s.bytes / 1e6),
        ttft_mesh_s=median(lambda s: s.ttft_mesh_s),
        ttft_whole_s=median(lambda s: s.ttft_whole_s),
        ttft_ratio=median(lambda s: s.ttft_mesh_s / s.ttft_whole_s),
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| prompt tokens | KV MB | forward ms | transfer ms | hidden | exposed ms | exposed / TTFT | TTFT mesh ms "
        "| TTFT whole ms | mesh / whole |",
        "| --- " * 10 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r.tokens} | {r.megabytes:.1f} | {r.forward_s * 1e3:.0f} | {r.transfer_s * 1e3:.1f} | {r.hidden:.1%} "
            f"| {r.exposed_s * 1e3:.2f} | {r.exposed_of_ttft:.2%} | {r.ttft_mesh_s * 1e3:.0f} "
            f"| {r.ttft_whole_s * 1e3:.0f} | {r.ttft_ratio:.2f} |"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_overlap", description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="256,512,1024,2048,4096", help="prompt tokens to prefill")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each length, after one warm-up")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine")
    parser.add_argument("--fabric", default="tcp", help="the fabric's provider")
    parser.add_argument("--output", default="report/bench_overlap.json", help="where the JSON goes")
    return parser.parse_args()


def _environment(arguments: argparse.Namespace, traces: Receiver) -> dict[str, str]:
    return {
        "KVMESH_OTLP_ENDPOINT": traces.endpoint,
        "KVMESH_THREADS": str(arguments.threads),
        "KVMESH_FABRIC": arguments.fabric,
    }


def _one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    return next(span for span in spans if span.name == name)


def _number(span: ReceivedSpan, attribute: str) -> float:
    return float(span.attributes[attribute])


def _write(rows: list[Row], arguments: argparse.Namespace) -> None:
    path = Path(arguments.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    report = {"machine": machine, "fabric": arguments.fabric, "threads": arguments.threads, "rows": rows}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))


if __name__ == "__main__":
    main()
