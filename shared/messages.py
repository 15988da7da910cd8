"""The structs that travel between services over NATS, msgpack-encoded. Nothing else travels; nothing executable does.

Time travels as a *budget*, the seconds that are left, never as a clock reading: hosts' clocks differ.
Every message to an instance names the incarnation that it is for. An `attempt` is minted by the router (32 hex digits of
`secrets.token_hex(16)`) and is never taken from a client.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.bounds import U32, AttemptId, Count, GrammarText, Incarnation, Name, Number, Positive, Ranks, Share, Size
from shared.layout import KvLayout

Role = Literal["prefill", "decode"]
State = Literal["ready", "draining", "left"]
FinishReason = Literal["stop", "length"]
Verify = Literal["no", "pages"]


PROTOCOL = 4
"""Version of these structs. A different one in an `Announce` is never paired."""


class InstanceRef(msgspec.Struct, frozen=True):
    """Which start of which instance."""

    name: Name
    incarnation: Incarnation


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides of a pair must have in common. `digest` covers configuration, weights and tokenizer."""

    name: str
    digest: str
    vocab_size: Size
    max_positions: Size


class FabricEndpoint(msgspec.Struct, frozen=True):
    """Where an instance's fabric listens. `address` is opaque: only `shared.transfer` reads it."""

    provider: str
    address: bytes


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself in every heartbeat; pairing predicts the time to first token from it."""

    free_pages: Count
    """Of all pools: a data parallel rank has one each."""
    largest_free_pages: Count
    """Of the pool that has the most: a request has all its pages in one."""
    total_pages: Count
    """Of all pools, which are of one size."""
    running: Count = 0
    """Requests in the running batch (decode), or in the current chunk (prefill)."""
    waiting: Count = 0
    """Requests admitted and not running: queued (prefill) or waiting for KV (decode)."""
    queued_prefill_tokens: Count = 0
    """Prompt tokens still to be computed, the current chunk's included (prefill)."""
    prefill_tokens_per_s: Positive | None = None
    """Measured, smoothed (prefill). None until something was measured."""
    step_s: Positive | None = None
    """Measured decode step, smoothed, seconds (decode). None until something was measured."""


class Announce(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat, published on `subjects.ANNOUNCE` every `heartbeat_s` and at every change of state."""

    role: Role
    instance: InstanceRef
    state: State
    model: ModelIdentity
    layout: KvLayout
    """The whole model's, whatever `tp` is."""
    fabric: FabricEndpoint
    max_batch: Size
    """Most requests that run at once, over all data parallel ranks (decode), or wait in the queue (prefill)."""
    load: Load
    http: str
    """Base URL of this instance's own /health, /ready and /metrics."""
    tp: Ranks = 1
    """Tensor parallel: ranks that share the KV heads (`shared.kv.shards`)."""
    dp: Ranks = 1
    """Data parallel: ranks of `tp` ranks each that have a pool and a batch of their own (decode)."""
    ep: Ranks = 1
    """Expert parallel: ranks over which the experts are spread."""
    protocol: int = PROTOCOL
    verify: Verify = "no"
    """Which digests this instance sends or checks: a pair's must be the same."""
    drafter: str = ""
    """Who proposes tokens and has KV of its own, which a pair must agree on: "mtp", or "draft" and the draft model's digest;
    empty: nobody (`KVMESH_SPECULATE` is off or ngram)."""

    @property
    def pool_pages(self) -> int:
        """Pages of one pool: the most that one request can hold."""
        return self.load.total_pages // self.dp


class Discover(msgspec.Struct, frozen=True, tag=True):
    """Router → every instance, on `subjects.DISCOVER`: announce yourself now."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at temperature 1, before biases and penalties: of the token that was drawn, and of
    the likeliest, in falling order."""

    logprob: float
    top: list[tuple[int, float]]


class Scoring(msgspec.Struct, frozen=True):
    """Log-probabilities that are wanted of tokens that are known: `targets` follow, one each, the tokens of a row from its
    `first`-th on, from 0; with each the `top` likeliest."""

    first: int
    targets: list[int]
    top: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a row's next token is drawn. `temperature` 0 is greedy. `seed` is always set (minted where the client gave
    none): the draw for position p is a pure function of (seed, p), so that it depends on no batch mate and survives a
    retry. `top_k` None: no limit.

    Before the draw, in this order: `logit_bias` is added; logits of tokens of prompt or output are divided (positive) or
    multiplied (negative) by `repetition_penalty`; tokens of the output lose `frequency_penalty` for each time and
    `presence_penalty` once. An output shorter than `min_tokens` gets none of its stop tokens."""

    temperature: Positive
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=1)] | None = None
    min_p: Share = 0.0
    seed: Annotated[int, Meta(ge=0)] = 0
    logit_bias: dict[U32, Number] = {}
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    min_tokens: Count = 0
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    """How many of the likeliest tokens come with each drawn one (`TokenLogprob`); None: no logarithms at all."""

    @property
    def looks_back(self) -> bool:
        """Whether the draw depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an output must match, from its first token to its last. The output ends with reason "stop" as soon as nothing can be
    added to it; where it can end, and can also go on, the model chooses. See `shared.grammar`."""

    kind: Literal["llguidance"] = "llguidance"
    """In whose form `text` is."""
    text: GrammarText


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Router → decoder, request/reply (`Accepted` | `RefusedReply`): run this attempt.

    `prefiller` is None exactly where the decoder runs `alone`, the prompt too: where that has one token, its logits are wanted,
    or nothing is to follow it (`max_tokens` 0).
    `stop_token_ids` end the output with reason "stop" and are not part of it; empty where `ignore_eos`.
    """

    attempt: AttemptId
    router: InstanceRef
    decoder: InstanceRef
    prefiller: Announce | None
    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    budget_s: Number
    grammar: Grammar | None = None
    """The prefiller never hears of it."""
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    """The same as `Sampling.logprobs` for the prompt's tokens but the first."""

    @property
    def alone(self) -> bool:
        return len(self.tokens) == 1 or self.max_tokens == 0 or self.prompt_logprobs is not None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class RefusedReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Not taken, nothing reserved. `retryable`: another instance, or this one later, may take it."""

    attempt: str
    code: Literal["busy", "draining", "stale_incarnation", "mismatch", "invalid", "duplicate", "unavailable"]
    reason: str
    retryable: bool


class CancelGenerate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Router → decoder: the client left, or a stop string was found. Idempotent; unknown attempts are counted."""

    attempt: str
    decoder: InstanceRef
    reason: str


class TailSlot(msgspec.Struct, frozen=True):
    """Where the tail context goes: byte offset in what the descriptor describes. It ends with the attempt."""

    region: bytes
    offset: Count


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decoder → prefiller, request/reply (`Accepted` | `RefusedReply`): compute tokens[:-1] and write their KV.

    The decoder has reserved `pages` and armed `immediate` before it sends this. Page i of the prompt goes to `pages[i]` of each
    of `regions`, once for each layer and each run of the two shardings (`shared.kv.shards.runs`), each write carrying
    `immediate`; then the tail, once, with the same immediate. Of a decoder's data parallel ranks only the one that runs the
    request is seen.
    """

    attempt: AttemptId
    prefiller: InstanceRef
    decoder: InstanceRef
    fabric: FabricEndpoint
    layout: KvLayout
    """The whole model's."""
    num_pages: U32
    """Pages in each of the decoder's regions: with the layout of a rank it gives the region's strides."""
    regions: Annotated[list[bytes], Meta(min_length=1, max_length=1024)]
    """Descriptors of KV regions of the decoder, one a tensor parallel rank of the data parallel rank that runs the request. They
    end with the attempt."""
    pages: list[U32]
    immediate: U32
    tail: TailSlot
    tokens: list[int]
    budget_s: Number
    digests: bool = False
    """The tail carries the digests of all pages (`shared.kv.digests`)."""
    drafter: str = ""
    """As in `Announce`. With "mtp" the tail carries the model's last hidden state of tokens[-2]."""

    @property
    def tp(self) -> int:
        """The decoder's tensor parallel."""
        return len(self.regions)


class CancelPrefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decoder → prefiller, request/reply (`Drained`). Answered in every state, and for unknown attempts, once no write of
    the attempt can land any more."""

    attempt: str
    prefiller: InstanceRef
    decoder: InstanceRef
    reason: str


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefiller → decoder: no write of this attempt is outstanding, and none will be posted. The answer to a cancel
    (`error` None), or a request of its own (`Accepted`) when the prefill failed, for the reason in `error`: repeated until it is
    answered, for nobody else tells the decoder."""

    attempt: str
    decoder: InstanceRef
    prefiller: InstanceRef
    error: str | None = None
    retryable: bool = True


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time to first token went, seconds, seen from the decoder; sent with the first tokens."""

    admitted_to_ready_s: Number
    first_step_s: Number
    transferred_bytes: Count


class Emit(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt has new. `index` is how many tokens of it were emitted before these: the router drops what it has
    and fails the attempt on a gap. `finish` ends it well, `error` ends it badly."""

    attempt: str
    index: Count
    tokens: list[U32] = []
    finish: FinishReason | None = None
    error: str | None = None
    retryable: bool = True
    timing: Timing | None = None
    logprobs: list[TokenLogprob] = []
    """One for each of `tokens`, where `Sampling.logprobs` asks for them."""
    scores: list[TokenLogprob] = []
    """Of the prompt's next tokens, where `Generate.prompt_logprobs` asks for them; all come before the first of `tokens`."""
    scored: Count = 0
    """How many came before these."""


class EmitBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decoder → router, one a router a step."""

    decoder: InstanceRef
    router: InstanceRef
    emits: list[Emit]


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decoder → router, request/reply (`Accepted` with an empty attempt), every second while it has attempts of that
    router and for some seconds after: attempt → tokens emitted so far, in order with the `EmitBatch`es. An attempt that
    is missing here, or a count ahead of what the router received, was lost. No listener: the router is gone, and its
    attempts are cancelled."""

    decoder: InstanceRef
    router: InstanceRef
    emitted: dict[str, int]


ToDecoder = Generate | CancelGenerate | Drained
ToPrefiller = Prefill | CancelPrefill
ToRouter = EmitBatch | StreamStatus
Reply = Accepted | RefusedReply
