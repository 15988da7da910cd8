"""Requests of a load test: how long prompt and output are, and when each is made.

Two kinds. Drawn: lengths are log-normal, as those of conversations are about (`Azure LLM inference traces, 2023`: a long tail on
both). From a file: each line is one request.

    Mooncake's traces (FAST'25), JSONL   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}
    Azure's traces (2023, 2024), CSV     TIMESTAMP,ContextTokens,GeneratedTokens    TIMESTAMP in ISO form
    anything else, CSV                   time_s,prompt_tokens,output_tokens

`hash_ids` name blocks of 512 tokens that requests have in common: the same id, the same tokens.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

BLOCK = 512
"""Tokens of a block that `hash_ids` names."""

FIRST, LAST = 1000, 40000
"""Token ids that prompts are made of."""


class Request(msgspec.Struct, frozen=True):
    """`at_s`: since the beginning of the trace; None: whenever a client is free."""

    prompt_tokens: int
    output_tokens: int
    at_s: float | None = None
    blocks: tuple[int, ...] = ()


class Lengths(msgspec.Struct, frozen=True):
    """A log-normal distribution of whole numbers with this median, 95 % of them under `p95`, cut off at `most`."""

    median: int
    p95: int
    most: int

    def draw(self, source: random.Random) -> int:
        sigma = math.log(self.p95 / self.median) / 1.645
        return max(1, min(self.most, round(source.lognormvariate(math.log(self.median), sigma))))

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "median:p95:most"; raises `ValueError` that says so."""
        try:
            median, p95, most = (int(part) for part in text.split(":"))
        except ValueError:
            raise ValueError(f"{text!r}: takes median:p95:most, three whole numbers") from None
        if not 0 < median <= p95 <= most:
            raise ValueError(f"{text!r}: takes 0 < median <= p95 <= most")
        return cls(median, p95, most)


def drawn(prompts: Lengths, outputs: Lengths, seed: int) -> Iterator[Request]:
    """Without end."""
    source = random.Random(seed)
    while True:
        yield Request(prompts.draw(source), outputs.draw(source))


def poisson(requests: Iterator[Request], per_second: float, seed: int) -> Iterator[Request]:
    """The same requests at random times: an open load, whose arrivals do not wait for answers."""
    source, now = random.Random(seed + 1), 0.0
    for request in requests:
        now += source.expovariate(per_second)
        yield msgspec.structs.replace(request, at_s=now)


def read(path: Path, *, speed: float = 1.0, most: int | None = None) -> list[Request]:
    """A trace, `speed` times as fast as it was, with its times from 0. `most`: prompts and outputs are cut so that both together
    have no more. Raises `ValueError` that names file and line."""
    rows = _jsonl(path) if path.suffix in (".jsonl", ".json") else _csv(path)
    found = []
    for number, row in rows:
        try:
            found.append(_request(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a request: {error!r}") from None
    if not found:
        raise ValueError(f"{path}: there is no request in it")
    begin = min(request.at_s or 0.0 for request in found)
    return [_fitted(request, begin, speed, most) for request in sorted(found, key=lambda request: request.at_s or 0.0)]


def prompt(request: Request, number: int, seed: int) -> list[int]:
    """Token ids, so that lengths are exact; blocks of the same id are the same, the rest is this request's own."""
    named = [token for block in request.blocks for token in _tokens(f"{seed} block {block}", BLOCK)]
    own = _tokens(f"{seed} request {number}", max(0, request.prompt_tokens - len(named)))
    return [*named, *own][: request.prompt_tokens]


def _tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST, LAST), k=count)


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, msgspec.json.decode(line, type=dict[str, object])
                except msgspec.DecodeError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None


def _csv(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    with path.open(newline="") as lines:
        yield from zip(itertools.count(2), csv.DictReader(lines), strict=False)


def _request(row: dict[str, object]) -> Request:
    if "input_length" in row:
        blocks = row.get("hash_ids") or ()
        assert isinstance(blocks, Sequence)
        ids = tuple(int(block) for block in blocks)
        return _sound(row["input_length"], row["output_length"], float(str(row["timestamp"])) / 1000, ids)
    if "ContextTokens" in row:
        when = datetime.datetime.fromisoformat(str(row["TIMESTAMP"])[:26])
        return _sound(row["ContextTokens"], row["GeneratedTokens"], when.timestamp())
    return _sound(row["prompt_tokens"], row["output_tokens"], float(str(row["time_s"])))


def _sound(prompt_tokens: object, output_tokens: object, at_s: float, blocks: tuple[int, ...] = ()) -> Request:
    request = Request(int(str(prompt_tokens)), int(str(output_tokens)), at_s, blocks)
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        raise ValueError("a prompt and an output have at least one token")
    return request


def _fitted(request: Request, begin: float, speed: float, most: int | None) -> Request:
    output = request.output_tokens if most is None else min(request.output_tokens, most // 2)
    prompt_tokens = request.prompt_tokens if most is None else min(request.prompt_tokens, most - output)
    return Request(prompt_tokens, output, ((request.at_s or 0.0) - begin) / speed, request.blocks)
