"""A model that is loaded and runs steps over a KV region."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import ModelError, RowsFailed
from shared.layout import KvLayout
from shared.messages import Scoring, TokenLogprob
from shared.models import _kernels
from shared.models.adjust import adjust
from shared.models.attention import BatchRow
from shared.models.checkpoint import Checkpoint
from shared.models.collective import Peers
from shared.models.config import ModelConfig, WeightsDtype, load_config
from shared.models.cpu import CpuAttention, CpuCache, Floats, Workspace
from shared.models.draft_model import DraftModel, check_draft
from shared.models.drafter import Drafter, Followed, tell_failure, told
from shared.models.loader import Loader
from shared.models.logprobs import Distribution
from shared.models.mtp import Mtp
from shared.models.sampling import sample
from shared.models.shard import shard_of
from shared.models.verify import Place, places_of
from shared.models.weights import Weights

SCORED_AT_ONCE = 32
"""Tokens whose logits are in memory at once while a prompt is scored: 20 MB with a vocabulary of 150000."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`purpose` "prefill": the model never samples, and a head that is not tied to the embedding is not loaded.
    `isa`: "auto", or an instruction set that must be used."""

    weights_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = 1
    purpose: Literal["prefill", "decode", "mixed"] = "mixed"
    isa: str = "auto"
    drafter: Literal["none", "mtp", "model"] = "none"
    """Who proposes tokens: nobody, the model's own multi-token prediction layer, or `draft_model`."""
    draft_model: str = ""


class Draws(NamedTuple):
    """`tokens`: for each row, none where none was asked for or another rank draws. `logprobs`: by row, one a token, where asked
    for."""

    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]]
    followed: Followed | None = None
    """What the drafter made of it, where there is one."""
    scores: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012 - never written to
    """Of the known tokens that rows ask for, by row."""

    @classmethod
    def none(cls, rows: int) -> Draws:
        return cls([[] for _ in range(rows)], {})


class Model:
    """Weights and attention over one KV region. Used by one thread at a time; keeps nothing of a request."""

    def __init__(
        self,
        directory: Path,
        options: ModelOptions,
        layout: KvLayout,
        num_pages: int,
        kv: npt.NDArray[np.uint8],
        *,
        peers: Peers = Peers(),  # noqa: B008 - immutable
    ) -> None:
        """`kv`: the region's bytes. `peers`: this is one rank of several, each with a region of its own; those of a tensor
        parallel group run the same steps, and all that share experts run one at once. `layout` is this rank's. Raises
        `ModelError` for a directory that cannot be loaded, or not by so many ranks, `ValueError` for a layout that is not
        this model's."""
        self.config = load_config(directory)
        self._prefills_only = options.purpose == "prefill" and not self.config.tied_embeddings
        shard = shard_of(peers)
        own = shard.config(self.config)
        self._page_size = layout.page_size
        self._draws, self._shares_experts, self._tensor = shard.rank == 0, shard.ep > 1, peers.tensor
        mtp = options.drafter == "mtp"
        _check_layout(own, layout.groups[0], mtp=mtp)
        _check_drafter(self.config, options, layout)
        dtype: WeightsDtype = self.config.dtype if options.weights_dtype == "auto" else options.weights_dtype
        self._context = _kernels.Context(options.threads, options.isa)
        self._workspace = Workspace()
        weights = Weights(Checkpoint(directory), self._context, dtype)
        loader = Loader(self.config, weights, self._context, self._workspace, peers)
        vectors = loader.vectors()
        self._embedding = loader.embedding(vectors)
        self._network = loader.network(vectors, with_head=options.purpose != "prefill")
        cached = msgspec.structs.replace(own, layers=own.layers + mtp)
        begin = layout.groups[0].region_bytes(num_pages)
        rank = self.config.latent.rank if self.config.latent else 0
        cache = CpuCache(layout.groups[0], num_pages, kv[:begin], rank)
        self._attention = CpuAttention(self._context, self._workspace, cached, cache, loader.head_norms(cached.layers))
        self._drafter: Drafter | None = None
        self.weights_bytes = weights.bytes
        if mtp:
            self._drafter = Mtp(
                *(self.config, weights, self._context, self._workspace, peers),
                model=self._network,
                embedding=self._embedding,
                attention=self._attention,
            )
            self.weights_bytes = weights.bytes
        elif layout.draft is not None:
            self._drafter = draft = DraftModel(
                Path(options.draft_model),
                self._context,
                peers,
                dtype=None if options.weights_dtype == "auto" else dtype,
                layout=layout.draft,
                num_pages=num_pages,
                kv=kv[begin:],
                with_head=options.purpose != "prefill",
            )
            self.weights_bytes += draft.weights_bytes

    @property
    def attention_name(self) -> str:
        return self._attention.name

    def step(self, rows: Sequence[BatchRow], after_attention: Callable[[], None] | None = None) -> list[int | None]:
        """The first token of each row of `draw`."""
        return [tokens[0] if tokens else None for tokens in self.draw(rows, after_attention).tokens]

    def draw(self, rows: Sequence[BatchRow], after_attention: Callable[[], None] | None = None) -> Draws:
        """One forward over `rows`: their K and V are written, and tokens are drawn for each row that asks for some.

        `after_attention` is called once a layer, when the tensor parallel group has written the layer's K and V. Only its
        rank 0 draws. Other rows never change what a row gets, not by a bit. Raises `RankLost`, and `RowsFailed` for rows
        that are not sound, in every rank of the group and before anything is written, or have logits that are not numbers;
        ranks that share experts with this one are not held up by it.
        """
        try:
            tokens = self._plan(rows)
        except (ValueError, OverflowError, TypeError) as error:
            self._stand_by()
            raise RowsFailed(str(error)) from None
        places = places_of(rows)
        scored = any(row.scoring is not None for row in rows)
        x = self._run(tokens, after_attention, fill_only=not places and not scored and self._fills_only)
        scores = self._scores(rows, x) if scored else {}
        draws = self._drawn(rows, places, x) if places else Draws.none(len(rows))
        if self._drafter is not None:
            known = self._in_all_ranks(rows, draws.tokens) if places else draws.tokens
            draws = draws._replace(followed=self._drafter.follow(rows, known, x, after_attention))
        _check_scores(scores)  # only now: the other ranks have come to every collective with this one
        return draws._replace(scores=scores)

    @property
    def _fills_only(self) -> bool:
        """Whether a forward for which nothing is drawn may end with the last layer's K and V."""
        return not isinstance(self._drafter, Mtp)

    def _in_all_ranks(self, rows: Sequence[BatchRow], tokens: list[list[int]]) -> list[list[int]]:
        if self._tensor is None:
            return tokens
        return told(self._tensor, tokens, 1 + max(row.drafts for row in rows))

    def all_logits(self, rows: Sequence[BatchRow]) -> Floats:
        """`[tokens, vocab]`: the logits after every token of the rows, in a tensor parallel group's rank 0; the others take
        part. For tests and scoring: it takes much memory."""
        return self._network.logits(self._run(self._plan(rows), None, fill_only=False)).copy()

    def _plan(self, rows: Sequence[BatchRow]) -> npt.NDArray[np.int32]:
        """The tokens of `rows`, which attention knows from now on. Raises `ValueError` for rows that are not sound."""
        for i, row in enumerate(rows):
            if (row.sample is not None or row.scoring is not None) and self._prefills_only:
                raise ValueError(f"row {i}: asks for a token of a model that was loaded to prefill only")
            if not 0 <= row.drafts < max(1, len(row.tokens)):
                raise ValueError(f"row {i}: {row.drafts} drafts of {len(row.tokens)} tokens")
            if row.scoring is not None:
                _check_scoring(row.scoring, len(row.tokens), self.config.vocab_size)
            self._check_drafting(i, row)
        tokens = np.array([token for row in rows for token in row.tokens], np.int64)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.config.vocab_size):
            raise ValueError(f"a token outside of 0 .. {self.config.vocab_size - 1}")
        self._attention.plan(rows)
        return tokens.astype(np.int32)

    def _check_drafting(self, i: int, row: BatchRow) -> None:
        """What a row asks of the drafter, before anything is written: it must not fail in the middle of a step."""
        if row.propose and (self._drafter is None or row.sample is None):
            raise ValueError(f"row {i}: asks for proposals, and there is no drafter or no token to follow")
        if not 0 <= row.chained <= len(row.tokens):
            raise ValueError(f"row {i}: {row.chained} of {len(row.tokens)} tokens are said to have been run")
        if row.hidden and (row.start < 1 or len(row.hidden) != self._hidden_bytes):
            raise ValueError(f"row {i}: a hidden state of {len(row.hidden)} bytes before position {row.start}")
        end, pages = row.start + len(row.tokens) + row.propose, len(row.pages) // 4
        if row.propose and (row.propose < 0 or end > min(self.config.max_positions, pages * self._page_size)):
            raise ValueError(f"row {i}: {row.propose} proposals need places up to {end}; it has {pages} pages")

    @property
    def _hidden_bytes(self) -> int:
        return 4 * self.config.hidden if isinstance(self._drafter, Mtp) else 0

    def _run(
        self, tokens: npt.NDArray[np.int32], after_attention: Callable[[], None] | None, *, fill_only: bool
    ) -> Floats:
        """Their last hidden states. Ranks that share experts all come to the last layer's, whatever they want of it."""
        x = self._workspace.floats("hidden", tokens.size, self.config.hidden)
        self._embedding.embed(tokens, x)
        if self.config.embedding_scale != 1.0:
            x *= np.float32(self.config.embedding_scale)
        fill_only = fill_only and not self._shares_experts
        self._network.run(x, self._attention, after_attention, fill_only=fill_only)
        return x

    def _stand_by(self) -> None:
        """Through a step with no rows, for the ranks that share experts with this one."""
        if self._shares_experts:
            self._run(self._plan([]), None, fill_only=False)

    def _scores(self, rows: Sequence[BatchRow], x: Floats) -> dict[int, list[TokenLogprob]]:
        """By row, where this rank draws. The logits of few tokens at a time are in memory; all ranks of a group take part."""
        scores: dict[int, list[TokenLogprob]] = {}
        begin = 0
        for i, row in enumerate(rows):
            if row.scoring is not None:
                first = begin + row.scoring.first
                scores[i] = self._score(x[first : first + len(row.scoring.targets)], row.scoring)
            begin += len(row.tokens)
        return scores if self._draws else {}

    def _score(self, hidden: Floats, scoring: Scoring) -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        for first in range(0, len(scoring.targets), SCORED_AT_ONCE):
            some = slice(first, first + SCORED_AT_ONCE)
            logits = self._network.logits(np.ascontiguousarray(hidden[some]))
            if self._draws:
                pairs = zip(logits, scoring.targets[some], strict=True)
                found += [Distribution(at, scoring.top).of(target) for at, target in pairs]
        return found

    def _drawn(self, rows: Sequence[BatchRow], places: Sequence[Place], x: Floats) -> Draws:
        """For each row of `places`, out of the hidden states of all rows' tokens; where this rank draws."""
        logits = self._network.logits(np.ascontiguousarray(x[[place.token for place in places]]))
        if not self._draws:
            return Draws.none(len(rows))
        known = [
            Distribution(at, sampling.logprobs) if sampling.logprobs is not None else None
            for at, sampling in zip(logits, (place.sampling for place in places), strict=True)
        ]
        try:
            for at, place in zip(logits, places, strict=True):
                adjust(at, rows[place.row], place.drafts)
            drawn = sample(
                self._context, logits, [place.sampling for place in places], [place.position for place in places]
            )
        except ValueError as error:
            if self._drafter is not None:
                tell_failure(self._tensor, len(rows), 1 + max(row.drafts for row in rows))
            raise RowsFailed(str(error)) from None
        draws = Draws.none(len(rows))
        for place, token, distribution in zip(places, drawn, known, strict=True):
            if not place.reached(draws.tokens[place.row]):
                continue
            draws.tokens[place.row].append(token)
            if distribution is not None:
                draws.logprobs.setdefault(place.row, []).append(distribution.of(token))
        return draws


def _check_scoring(scoring: Scoring, tokens: int, vocab: int) -> None:
    if scoring.first < 0 or scoring.first + len(scoring.targets) > tokens:
        raise ValueError(f"scores from token {scoring.first} on, {len(scoring.targets)} in a row of {tokens}")
    if any(not 0 <= target < vocab for target in scoring.targets):
        raise ValueError(f"scores of a token outside of 0 .. {vocab - 1}")


def _check_scores(scores: dict[int, list[TokenLogprob]]) -> None:
    if not all(math.isfinite(one.logprob) for row in scores.values() for one in row):
        raise RowsFailed("the logits of a prompt are not numbers")


def _check_layout(config: ModelConfig, layout: KvLayout, *, mtp: bool) -> None:
    expected = config.layout(page_size=layout.page_size, dtype=layout.dtype, mtp=mtp)
    if layout != expected:
        raise ValueError(f"the layout is {layout}, the model's is {expected}")


def _check_drafter(config: ModelConfig, options: ModelOptions, layout: KvLayout) -> None:
    """Raises `ModelError` for one that the model does not have, `ValueError` for a layout without room for it."""
    if options.drafter == "mtp" and not config.mtp_layers:
        raise ModelError("the model has no multi-token prediction layer (num_nextn_predict_layers is 0)")
    if (options.drafter == "model") != (layout.draft is not None):
        raise ValueError(f"drafter {options.drafter!r} and layout {layout}")
    if options.drafter == "model":
        check_draft(config, load_config(Path(options.draft_model)), Path(options.draft_model))
