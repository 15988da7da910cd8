"""What speculation saves: the time a token of the output takes, with and without it.

    python -m loadtest.bench_speculation [--repeats 7] [--tokens 128] [--speculate ngram]

Two meshes of one prefiller and one decoder, alike but for the setting, asked in turn for the same greedy completion of one
request at a time; who is asked first alternates. The time is that from the first event to the last, over the tokens after the
first. Medians, and the median of the ratios of pairs. Both must say the same, or it stops. What stood is as the decoder counts.
Prints a table and writes report/bench_speculation.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from loadtest.bench_overlap import MODEL
from loadtest.local import LocalMesh, local_mesh

FLAGS = ("--decoders", "1", "--prefillers", "1", "--model", MODEL)

_RECORD = '{{"id": {0}, "name": "user-{0}", "address": {{"street": "Main Street", "town": "Springfield"}}, "active": true}},\n'
_TEXT = (
    "The committee met on Tuesday to discuss the new bridge. The engineer said that the foundations were sound, and that the "
    "work could begin in spring. The mayor asked how long the road would be closed. The engineer said that the road would be "
    "closed for six weeks, and that the detour would be marked."
)
PROMPTS = {
    "records of one form": "[\n" + "".join(_RECORD.format(number) for number in range(1, 9)),
    "a text to be copied": f"Text:\n{_TEXT}\n\nThe same text again:\n",
    "a story": "Once upon a time, in a village by the sea, there lived an old fisherman who",
}


class Answer(NamedTuple):
    tokens: list[int]
    token_s: float


class Row(msgspec.Struct, frozen=True):
    """Medians over the pairs of one prompt."""

    prompt: str
    tokens: int
    pairs: int
    token_ms: float
    token_ms_speculating: float
    speed_up: float
    drafted: int
    """In one answer."""
    acceptance: float
    """Of the drafted tokens."""


def main() -> None:
    arguments = _arguments()
    environment = {"KVMESH_THREADS": str(arguments.threads)}
    with (
        local_mesh(*FLAGS, environment=environment) as plain,
        local_mesh(*FLAGS, "--speculate", arguments.speculate, environment=environment) as speculating,
    ):
        rows = [measure(name, arguments, plain, speculating) for name in PROMPTS]
    print(table(rows))
    _write(rows, arguments)


def measure(name: str, arguments: argparse.Namespace, plain: LocalMesh, speculating: LocalMesh) -> Row:
    """One warm-up of each, then the pairs."""
    pairs: list[tuple[float, float]] = []
    for number in range(arguments.repeats + 1):
        before = _counted(speculating)
        order = [plain, speculating] if number % 2 else [speculating, plain]
        answers = {mesh.url: complete(mesh.url, PROMPTS[name], arguments.tokens) for mesh in order}
        ours, theirs = answers[plain.url], answers[speculating.url]
        if ours.tokens != theirs.tokens:
            raise RuntimeError(f"{name}: {ours.tokens} is said without speculation, {theirs.tokens} with it")
        if number:
            pairs.append((ours.token_s, theirs.token_s))
    drafted, accepted = (after - then for after, then in zip(_counted(speculating), before, strict=True))
    without, with_ = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return Row(
        prompt=name,
        tokens=arguments.tokens,
        pairs=len(pairs),
        token_ms=without,
        token_ms_speculating=with_,
        speed_up=statistics.median(a / b for a, b in pairs),
        drafted=int(drafted),
        acceptance=accepted / drafted if drafted else 0.0,
    )


def complete(url: str, prompt: str, max_tokens: int) -> Answer:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
    asked = {"max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
    body = {"model": MODEL, "prompt": prompt, **asked}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"the mesh answered {answer.status}: {answer.read().decode()}")
    tokens: list[int] = []
    first, times = 0, []
    for line in answer:
        if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
            times.append(time.perf_counter())
            tokens += choices[0]["token_ids"]
            first = first or len(tokens)
    connection.close()
    return Answer(tokens, (times[-1] - times[0]) / (len(tokens) - first))


def _counted(mesh: LocalMesh) -> tuple[float, float]:
    """(Drafted, accepted) tokens so far."""
    with urllib.request.urlopen(f"{mesh.urls['decode']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = dict(re.findall(r"^kvmesh_decode_(drafted|accepted)_tokens_total (\S+)$", text, re.MULTILINE))
    return float(found["drafted"]), float(found["accepted"])


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| prompt | ms a token | speculating | speed-up | drafted | stood |", "| --- " * 6 + "|"]
    for r in rows:
        figures = f"{r.token_ms:.1f} | {r.token_ms_speculating:.1f} | {r.speed_up:.2f}"
        lines.append(f"| {r.prompt} | {figures} | {r.drafted} | {r.acceptance:.0%} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_speculation", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="pairs of each prompt, after one warm-up")
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument("--speculate", default="ngram", help="KVMESH_SPECULATE of the one mesh")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine")
    parser.add_argument("--output", default="report/bench_speculation.json", help="where the JSON goes")
    return parser.parse_args()


def _write(rows: list[Row], arguments: argparse.Namespace) -> None:
    path = Path(arguments.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"cores": len(os.sched_getaffinity(0)), "speculate": arguments.speculate, "rows": rows}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))


if __name__ == "__main__":
    main()
