"""The step protocol between an instance's main process and its executor: msgpack frames over one socket pair.

The executor is a pure function of a step: it keeps weights and the KV region, and no request. Whatever a row needs,
its pages, its sampling, its seed, comes with the row; so a request can be cancelled, preempted or recomputed without
telling the executor.

Frame: 4 bytes little-endian length, then that many bytes of msgpack. Main → executor: `Start` once, then `Step`s, one at
a time, then `Stop`. Executor → main: `Started` | `StartFailed`, then one `StepDone` | `StepError` for each `Step`, in order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.layout import KvLayout
from shared.messages import Sampling, Scoring, TokenLogprob

Drafter = Literal["none", "mtp", "model"]


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
    drafter: Drafter = "none"
    """Who proposes tokens: "mtp", the model's own multi-token prediction layer, or "model", that of `draft_model`, a directory
    like `model`. `layout` has room for its KV."""
    draft_model: str = ""
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
    `sample` None: no logits are computed for this row. Otherwise tokens are drawn as `shared.models.verify` has it: one after
    the last token, or, where the last `drafts` of `tokens` are proposals, one after each place up to the first that is not what
    is drawn there."""

    tokens: list[int]
    start: int
    pages: bytes
    sample: Sampling | None = None
    drafts: int = 0
    propose: int = 0
    """Tokens that the drafter (`Start.drafter`) proposes after the row's, for the next step: `pages` then has places for
    them too."""
    chained: int = 0
    """How many of `tokens`, from the first, a draft model has run, as it proposed those after them."""
    following: int | None = None
    """The token after `tokens`, where the row draws none, and it is known: a multi-token prediction layer needs it."""
    hidden: bytes = b""
    """For that layer, where the row before this one was another instance's: the model's hidden state of position start - 1, as
    `StepDone.hidden` has it. At most once a request, so that it may travel with the row."""
    history: bytes = b""
    """All tokens before the first that is drawn, int32 little-endian, where `sample.looks_back`; the first `prompt_tokens` of
    them are the prompt."""
    prompt_tokens: int = 0
    forbidden: list[int] = []
    """Tokens that cannot be drawn, in any place of the row."""
    mask: bytes = b""
    """Which tokens may be drawn, for each position of the row that draws one: ceil(vocab / 32) * 4 bytes each, bit t
    (little-endian) set where token t may come. It wins over `forbidden`. Empty: all may."""
    scoring: Scoring | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One forward over all rows together. `signal`: advance the layer counter once after each layer's attention."""

    step: int
    rows: list[Row]
    signal: bool = False


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`sampled[i]` are row i's tokens, none where it asked for none: of a row with drafts those that were right, and the one
    after them. `logprobs` has one for each, of the rows that asked for them, by row. `scores[i]` are those of row i's `scoring`.

    `begin_ns`, `end_ns`: CLOCK_MONOTONIC around the forward. `counter`: the layer counter after it."""

    step: int
    sampled: list[list[int]]
    begin_ns: int
    end_ns: int
    counter: int
    logprobs: dict[int, list[TokenLogprob]] = {}
    proposed: dict[int, list[int]] = {}
    """By row, where it asked for them."""
    hidden: dict[int, bytes] = {}
    """By row: float32, little-endian, the model's last hidden state of its last token, after the final norm; of those that draw
    nothing and do not know the token after it, where a multi-token prediction layer follows."""
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
