"""The step protocol between an instance's main process and its executor: msgpack frames over one socket pair.

The executor is a pure function of a step: it keeps weights and the KV region, and no request. Whatever a row needs,
its pages, its sampling, its seed, comes with the row; so a request can be cancelled, preempted or recomputed without
telling the executor.

Frame: 4 bytes little-endian length, then that many bytes of msgpack. Main → executor: `Start` once, then `Step`s, one at
a time, then `Stop`. Executor → main: `Started` | `StartFailed`, then one `StepDone` | `StepError` for each `Step`, in order.
"""

from __future__ import annotations

import msgspec

from shared.layout import KvLayout
from shared.messages import Sampling, Scoring, TokenLogprob


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load the model and map the region. File descriptors are inherited: `kv_fd` is the memfd of the KV region,
    `counter_fd` that of the layer counter (see `shared.engine.counter`)."""

    model: str
    """A directory in Hugging Face form, already on this machine."""
    weights_dtype: str
    """"auto" (as the checkpoint), "float32" or "bfloat16"."""
    layout: KvLayout
    num_pages: int
    threads: int
    purpose: str
    """"prefill", "decode" or "mixed": which forms of the weights are worth keeping in memory."""
    kv_fd: int
    counter_fd: int
    rank: int = 0
    tp: int = 1
    dp: int = 1
    """This is rank `rank` of dp groups of `tp` ranks, in the order of groups. A group is sent the same steps and its first
    rank draws the tokens; rank 0 alone advances the layer counter. `layout` is this rank's."""
    tensor_fd: int | None = None
    """The memfd of `shared.models.collective` that a group sums over; None where `tp` is 1."""
    expert_fd: int | None = None
    """The memfd over which all ranks exchange what their experts take and give; None where experts are not spread."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    load_s: float
    weights_bytes: int
    attention: str
    """Which attention kernel runs, with its instruction set: "cpu-avx512", "cpu-avx2", "cpu-generic"."""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    detail: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` run at positions start, start+1, ...; their K and V are written into `pages`; they attend to positions
    0 .. their own. `pages` is the request's page table, int32 little-endian, long enough for start + len(tokens) tokens.
    `sample` None: no logits are computed for this row. Otherwise one token is drawn from the last token's logits."""

    tokens: list[int]
    start: int
    pages: bytes
    sample: Sampling | None = None
    history: bytes = b""
    """All tokens before the one that is drawn, int32 little-endian, where `sample.looks_back`; the first `prompt_tokens` of
    them are the prompt."""
    prompt_tokens: int = 0
    forbidden: list[int] = []
    """Tokens that cannot be drawn."""
    scoring: Scoring | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One forward over all rows together. `signal`: advance the layer counter once after each layer's attention."""

    step: int
    rows: list[Row]
    signal: bool = False


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`sampled[i]` is row i's token, None where it asked for none; `logprobs` has those of the rows that asked for them, by
    row; `scores[i]` are those of row i's `scoring`.

    `begin_ns`, `end_ns`: CLOCK_MONOTONIC around the forward. `counter`: the layer counter after it."""

    step: int
    sampled: list[int | None]
    begin_ns: int
    end_ns: int
    counter: int
    logprobs: dict[int, TokenLogprob] = {}
    scores: dict[int, list[TokenLogprob]] = {}


class StepError(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The step raised. The KV of its rows is undefined. `counter`: the layer counter after it."""

    step: int
    detail: str
    counter: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


ToExecutor = Start | Step | Stop
FromExecutor = Started | StartFailed | StepDone | StepError
