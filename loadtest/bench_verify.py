"""What `KVMESH_VERIFY=pages` costs: time to first token with and without it.

    python -m loadtest.bench_verify [--lengths 512,2048] [--repeats 9]

Two meshes of one prefiller and one decoder, alike but for the setting, asked in turn for one token after the same new prompt;
who is asked first alternates. Medians, and the median of the ratios of pairs. Prints a table.
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics

from loadtest.bench_overlap import MODEL, first_token
from loadtest.local import local_mesh

FLAGS = ("--decoders", "1", "--prefillers", "1", "--model", MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench_verify", description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="512,2048", help="prompt tokens to prefill")
    parser.add_argument("--repeats", type=int, default=9, help="pairs of each length, after one warm-up")
    arguments = parser.parse_args()
    threads = {"KVMESH_THREADS": "1"}
    with (
        local_mesh(*FLAGS, environment={**threads, "KVMESH_VERIFY": "no"}) as plain,
        local_mesh(*FLAGS, environment={**threads, "KVMESH_VERIFY": "pages"}) as verifying,
    ):
        print("| prompt tokens | TTFT ms | TTFT ms, verified | ratio |\n| --- | --- | --- | --- |")
        for length in (int(n) for n in arguments.lengths.split(",")):
            print(row(length, arguments.repeats, plain.url, verifying.url), flush=True)


def row(tokens: int, repeats: int, plain: str, verifying: str) -> str:
    draw = random.Random(tokens)
    pairs = []
    for number in range(repeats + 1):
        prompt = draw.choices(range(1000, 40000), k=tokens + 1)
        order = [plain, verifying] if number % 2 else [verifying, plain]
        took = {url: first_token(url, prompt, secrets.token_hex(16)) for url in order}
        if number:
            pairs.append((took[plain], took[verifying]))
    without, with_ = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return f"| {tokens} | {without:.0f} | {with_:.0f} | {ratio:.3f} |"


if __name__ == "__main__":
    main()
