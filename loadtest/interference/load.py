"""What both sides are asked, and what they say about it."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` that decode all the while; beside them prompts of `prompt_tokens`, each for `output_tokens`, that come at random,
    `per_second` on average, for `seconds`. All of it is drawn from `seed`."""

    seconds: float = 30.0
    streams: int = 4
    stream_prompt_tokens: int = 64
    prompt_tokens: int = 1024
    output_tokens: int = 16
    per_second: float = 0.25
    seed: int = 1

    def arrivals(self) -> list[float]:
        """Seconds from the beginning."""
        draw, now, found = random.Random(self.seed), 0.0, []
        while (now := now + draw.expovariate(self.per_second)) < self.seconds:
            found.append(now)
        return found

    def stream_prompt(self, number: int) -> list[int]:
        return _tokens(f"{self.seed} stream {number}", self.stream_prompt_tokens)

    def prompt(self, number: int) -> list[int]:
        return _tokens(f"{self.seed} prompt {number}", self.prompt_tokens)


class Heard(msgspec.Struct):
    """Seconds from the beginning, by one clock: `tokens` of each stream, of those that came from then on; of each prompt `asked`
    and its own `first` and `last` token. A prompt that had not ended when the run did is not there."""

    tokens: list[list[float]] = []
    asked: list[float] = []
    first: list[float] = []
    last: list[float] = []


class Summary(msgspec.Struct, frozen=True):
    """Of one run. Times in seconds; `itl`: between two tokens of a stream, over all streams; a stream is as slow as its tokens
    are far apart on average (`tpot`)."""

    itl_p50: float
    itl_p99: float
    itl_max: float
    tpot: float
    stream_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tokens_per_s: float
    """All tokens that were generated, of streams and prompts."""
    prompts: int


def summarise(load: Load, heard: Heard) -> Summary:
    """Raises `ValueError` where a stream said nothing, or no prompt ended."""
    gaps = sorted(later - earlier for times in heard.tokens for earlier, later in pairwise(times))
    waits = sorted(first - asked for asked, first in zip(heard.asked, heard.first, strict=True))
    if not waits or any(len(times) < 2 for times in heard.tokens):
        raise ValueError("a stream said nothing, or no prompt ended")
    count = sum(len(times) for times in heard.tokens)
    tpot = sum((times[-1] - times[0]) / (len(times) - 1) for times in heard.tokens) / len(heard.tokens)
    return Summary(
        itl_p50=at(gaps, 0.5),
        itl_p99=at(gaps, 0.99),
        itl_max=gaps[-1],
        tpot=tpot,
        stream_tokens_per_s=count / len(heard.tokens) / load.seconds,
        ttft_p50=at(waits, 0.5),
        ttft_p99=at(waits, 0.99),
        tokens_per_s=(count + len(waits) * load.output_tokens) / load.seconds,
        prompts=len(waits),
    )


def at(ordered: list[float], part: float) -> float:
    """The quantile of values in rising order."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def _tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=count)
