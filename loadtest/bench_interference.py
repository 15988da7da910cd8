"""What prefill does to decoding streams where both share an engine, and where they do not.

    python -m loadtest.bench_interference [--rounds 3] [--seconds 30] [--per-second 0.25] [--prompt-tokens 1024]

The same engine, model and arrivals twice, in turns: *mixed*, one process on two cores with chunked prefill, the chunk in the
same step as the decoding rows; and *split*, a mesh of one prefiller on one core and one decoder on the other, asked over HTTP.
Some streams decode all the while; long prompts come at random. The gaps between tokens are those of the streams. Medians over
the rounds; ratios of the same round, then their median. Prints a table, and writes report/bench_interference.json and .png.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec

from loadtest.interference import split
from loadtest.interference.load import Heard, Load, Summary, summarise
from loadtest.interference.mixed import mixed_engine
from loadtest.local import local_mesh

MODEL = "smollm2-135m-instruct"
ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("gap between tokens, p50", "itl_p50", 1e3, "ms"),
    ("gap between tokens, p99", "itl_p99", 1e3, "ms"),
    ("gap between tokens, longest", "itl_max", 1e3, "ms"),
    ("time a token (TPOT), mean", "tpot", 1e3, "ms"),
    ("tokens/s of a stream", "stream_tokens_per_s", 1, ""),
    ("TTFT of the prompts, p50", "ttft_p50", 1e3, "ms"),
    ("TTFT of the prompts, p99", "ttft_p99", 1e3, "ms"),
    ("tokens/s in all", "tokens_per_s", 1, ""),
)


class Round(msgspec.Struct, frozen=True):
    mixed: Summary
    split: Summary


def main() -> None:
    arguments = _arguments()
    load = Load(
        seconds=arguments.seconds,
        streams=arguments.streams,
        prompt_tokens=arguments.prompt_tokens,
        per_second=arguments.per_second,
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("bench_interference: it needs two cores")
    environment = {
        "KVMESH_THREADS": "1",
        "KVMESH_KV_TOKENS": "65536",
        "KVMESH_CHUNK_TOKENS": str(arguments.chunk_tokens),
    }
    with (
        local_mesh("--decoders", "1", "--model", MODEL, environment=environment) as mesh,
        mixed_engine(MODEL, threads=2, chunk_tokens=arguments.chunk_tokens) as mixed,
    ):
        split.pin(mesh, prefill=cores[0], decode=cores[1])
        rounds, last = [], (Heard(), Heard())
        for number in range(arguments.rounds):
            own = msgspec.structs.replace(load, seed=number + 1)
            last = _turn(number, lambda: mixed(own), lambda: split.run(mesh, MODEL, own))  # noqa: B023 - called at once
            rounds.append(Round(*(summarise(own, heard) for heard in last)))
    print(table(rounds, arguments, load))
    _write(rounds, last, arguments, load)


def _turn(number: int, mixed: Callable[[], Heard], apart: Callable[[], Heard]) -> tuple[Heard, Heard]:
    """Who begins alternates."""
    if number % 2:
        second = apart()
        return mixed(), second
    return mixed(), apart()


def table(rounds: list[Round], arguments: argparse.Namespace, load: Load) -> str:
    """Markdown."""
    prompts = sum(each.split.prompts for each in rounds)
    lines = [
        f"{load.streams} streams; {load.per_second:g} prompts/s of {load.prompt_tokens} tokens ({prompts} in all); chunks of "
        f"{arguments.chunk_tokens}; {len(rounds)} rounds of {load.seconds:g} s\n",
        "| | mixed | split | split / mixed |",
        "| --- | --- | --- | --- |",
    ]
    for name, field, scale, unit in ROWS:
        mixed, apart, ratio = medians(rounds, field)
        lines.append(
            f"| {name} | {mixed * scale:.1f} {unit} | {apart * scale:.1f} {unit} | {ratio:.2f} |".replace("  ", " ")
        )
    return "\n".join(lines)


def medians(rounds: list[Round], field: str) -> tuple[float, float, float]:
    """Of both sides, and of the rounds' own ratios."""
    pairs = [(getattr(each.mixed, field), getattr(each.split, field)) for each in rounds]
    return (
        statistics.median(mixed for mixed, _ in pairs),
        statistics.median(apart for _, apart in pairs),
        statistics.median(apart / mixed for mixed, apart in pairs),
    )


def _write(rounds: list[Round], last: tuple[Heard, Heard], arguments: argparse.Namespace, load: Load) -> None:
    path = Path(arguments.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"load": load, "chunk_tokens": arguments.chunk_tokens, "rounds": rounds}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    plot(last, path.with_suffix(".png"))


def plot(heard: tuple[Heard, Heard], path: Path) -> None:
    """Every gap between two tokens of a stream, over the last round; a line where a prompt came."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, sharey=True, figsize=(10, 6), layout="constrained")
    for axis, one, name in zip(axes, heard, ("mixed", "split"), strict=True):
        for times in one.tokens:
            gaps = [(later - earlier) * 1e3 for earlier, later in pairwise(times)]
            axis.plot(times[1:], gaps, ".", markersize=2)
        for at in one.asked:
            axis.axvline(at, color="0.8", linewidth=0.8, zorder=0)
        axis.set(yscale="log", title=name, ylabel="ms since the token before")
    axes[1].set(xlabel="seconds; grey: a long prompt comes")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_interference", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of both sides")
    parser.add_argument("--seconds", type=float, default=30.0, help="of one side's turn")
    parser.add_argument("--streams", type=int, default=4, help="that decode all the while")
    parser.add_argument("--per-second", type=float, default=0.25, help="long prompts, on average")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of a long prompt")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="of one forward, on both sides")
    parser.add_argument(
        "--output", default="report/bench_interference.json", help="where the JSON goes; the plot beside it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
