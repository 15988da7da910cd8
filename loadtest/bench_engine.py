"""The engine alone beside transformers (float32, sdpa) on the same weights: `python -m loadtest.bench_engine`.

Prefill is a prompt until its first token, decode is steps of N streams after 128 tokens each. Both engines are loaded in
processes of their own, one for each thread count, and take turns in every round; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

ENGINES = ("kvmesh", "transformers")
PROMPTS = (128, 1024, 4096)
STREAMS = (1, 8, 32)
CONTEXT = 128
STEPS = 16
TARGETS = {"prefill": 1.0, "decode": 1.5}
TARGET_STREAMS = (1, 8)
REPORT = Path("report/bench_engine.json")


class Engine(Protocol):
    """One engine in its own process. Both methods return seconds."""

    def prefill(self, tokens: list[int]) -> float: ...
    def decode(self, streams: int, steps: int) -> float: ...


def made_up(count: int, seed: int, vocab: int) -> list[int]:
    """Token ids that every engine can run: a linear congruential sequence."""
    tokens, state = [], seed + 1
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        tokens.append(state % vocab)
    return tokens


def kvmesh_engine(directory: Path, threads: int) -> Engine:
    from shared.engine.protocol import Row
    from shared.engine.whole import GREEDY, Whole, WholeConfig
    from shared.models.model import ModelOptions

    options = ModelOptions(threads=threads)
    whole = Whole(directory, WholeConfig(options=options, kv_dtype="bfloat16", kv_tokens=16384))
    vocab = whole.model.config.vocab_size

    class Kvmesh:
        def prefill(self, tokens: list[int]) -> float:
            (pages,) = whole.page_tables([len(tokens)])
            begin = time.perf_counter()
            whole.prefill(tokens[:-1], pages)
            whole.model.step([Row(tokens=tokens[-1:], start=len(tokens) - 1, pages=pages, sample=GREEDY)])
            return time.perf_counter() - begin

        def decode(self, streams: int, steps: int) -> float:
            tables = whole.page_tables([CONTEXT + steps] * streams)
            for i, pages in enumerate(tables):
                whole.prefill(made_up(CONTEXT, i, vocab), pages)
            tokens: list[int] = [1] * streams
            begin = time.perf_counter()
            for step in range(steps):
                rows = [
                    Row(tokens=[token], start=CONTEXT + step, pages=pages, sample=GREEDY)
                    for token, pages in zip(tokens, tables, strict=True)
                ]
                tokens = [token or 0 for token in whole.model.step(rows)]
            return time.perf_counter() - begin

    return Kvmesh()


def transformers_engine(directory: Path, threads: int) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    vocab = model.config.vocab_size

    class Transformers:
        @torch.inference_mode()
        def prefill(self, tokens: list[int]) -> float:
            ids = torch.tensor([tokens])
            begin = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            return time.perf_counter() - begin

        @torch.inference_mode()
        def decode(self, streams: int, steps: int) -> float:
            ids = torch.tensor([made_up(CONTEXT, i, vocab) for i in range(streams)])
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            tokens = torch.ones(streams, 1, dtype=torch.long)
            begin = time.perf_counter()
            for _ in range(steps):
                tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            return time.perf_counter() - begin

    return Transformers()


def serve(name: str, directory: Path, threads: int) -> None:
    """The child: answers lines of JSON on stdin with lines of JSON on stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        engine = (kvmesh_engine if name == "kvmesh" else transformers_engine)(directory, threads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "prefill" in task:
            seconds = engine.prefill(made_up(task["prefill"], 7, 49152))
        else:
            seconds = engine.decode(task["decode"], task["steps"])
        print(json.dumps({"seconds": seconds, "rss_mb": rss_mb()}), flush=True)


def rss_mb() -> float:
    """Resident memory of this process, its KV included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Child:
    """A child process that measures when asked."""

    def __init__(self, name: str, directory: Path, threads: int) -> None:
        command = [sys.executable, "-m", "loadtest.bench_engine", "--child", name, "--model", str(directory)]
        environ = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            text=True,
        )
        self.name, self.threads, self.rss_mb = name, threads, 0.0
        self._answer()

    def measure(self, **task: int) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        answer = self._answer()
        self.rss_mb = max(self.rss_mb, answer["rss_mb"])
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def children(directory: Path, thread_counts: list[int]) -> Iterator[list[Child]]:
    with contextlib.ExitStack() as stack:
        made = []
        for threads in thread_counts:
            for name in ENGINES:
                child = Child(name, directory, threads)
                stack.callback(child.close)
                made.append(child)
        yield made


def interleaved(group: list[Child], rounds: int, measure: Callable[[Child], float]) -> dict[str, float]:
    """Median seconds by engine; the engines take turns, and one turn each goes before, unmeasured."""
    seconds: dict[str, list[float]] = {child.name: [] for child in group}
    for child in group:
        measure(child)
    for _ in range(rounds):
        for child in group:
            seconds[child.name].append(measure(child))
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench(directory: Path, thread_counts: list[int], rounds: int, prompts: list[int]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with children(directory, thread_counts) as made:
        for threads in thread_counts:
            group = [child for child in made if child.threads == threads]
            for length in prompts:
                times = interleaved(group, rounds, lambda child, n=length: child.measure(prefill=n))  # type: ignore[misc]
                rows.append(row("prefill", length, threads, length, times))
            for streams in STREAMS:
                times = interleaved(group, rounds, lambda child, n=streams: child.measure(decode=n, steps=STEPS))  # type: ignore[misc]
                rows.append(row("decode", streams, threads, streams * STEPS, times))
        memory = [{"engine": c.name, "threads": c.threads, "rss_mb": round(c.rss_mb)} for c in made]
    machine = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    return {"model": str(directory), "rounds": rounds, "machine": machine, "rows": rows, "memory": memory}


def row(kind: str, size: int, threads: int, tokens: int, seconds: dict[str, float]) -> dict[str, Any]:
    rates = {name: tokens / value for name, value in seconds.items()}
    ratio = rates["kvmesh"] / rates["transformers"]
    aimed = kind == "prefill" or size in TARGET_STREAMS
    target = TARGETS[kind] if aimed else None
    return {"kind": kind, "size": size, "threads": threads, "tokens_per_s": rates, "ratio": ratio, "target": target}


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(report: dict[str, Any]) -> str:
    lines = [f"{'':8} {'':>12} {'threads':>7} {'kvmesh':>10} {'transformers':>13} {'ratio':>6}  target (tokens/s)"]
    for r in report["rows"]:
        rates, what = r["tokens_per_s"], f"{r['size']} {'tokens' if r['kind'] == 'prefill' else 'streams'}"
        target = "" if r["target"] is None else f"{r['target']} {'met' if r['ratio'] >= r['target'] else 'MISSED'}"
        figures = f"{rates['kvmesh']:10.1f} {rates['transformers']:13.1f} {r['ratio']:6.2f}"
        lines.append(f"{r['kind']:8} {what:>12} {r['threads']:7} {figures}  {target}")
    lines += [f"resident memory: {m['engine']}, {m['threads']} threads: {m['rss_mb']} MB" for m in report["memory"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="loadtest.bench_engine", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="directory, hub id or the default model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="lengths of prompts, tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve(arguments.child, Path(arguments.model), arguments.threads[0])
        return
    from shared.models.source import resolve

    report = bench(resolve(arguments.model), arguments.threads, arguments.rounds, arguments.prompts)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
