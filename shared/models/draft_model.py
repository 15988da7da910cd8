"""A smaller network with the same vocabulary that proposes tokens, with KV of its own (`KvLayout.draft`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.layout import KvLayout
from shared.models import _kernels
from shared.models.attention import BatchRow
from shared.models.checkpoint import Checkpoint
from shared.models.collective import Peers
from shared.models.config import ModelConfig, WeightsDtype, load_config
from shared.models.cpu import CpuAttention, CpuCache, Floats, Workspace
from shared.models.drafter import AfterLayer, Chain, Drawer, Followed, Span, propose, stood
from shared.models.loader import Loader
from shared.models.shard import shard_of
from shared.models.weights import Weights


class DraftModel:
    """A `shared.models.drafter.Drafter`. Split like the model over the tensor parallel group; with data parallelism every group
    has all of its experts."""

    def __init__(
        self,
        directory: Path,
        context: _kernels.Context,
        peers: Peers,
        *,
        dtype: WeightsDtype | None,
        layout: KvLayout,
        num_pages: int,
        kv: npt.NDArray[np.uint8],
        with_head: bool,
    ) -> None:
        """`layout`: this rank's, of the draft alone; `kv`: its part of the region. `dtype` None: as the checkpoint. Raises as
        `shared.models.model.Model`."""
        self._config = config = load_config(directory)
        peers = Peers(tensor=peers.tensor)
        own = shard_of(peers).config(config)
        if own.layout(page_size=layout.page_size, dtype=layout.dtype) != layout:
            raise ValueError(f"the draft's layout is {layout}, which is not the model's in {directory}")
        self._workspace = Workspace()
        weights = Weights(Checkpoint(directory), context, dtype or config.dtype)
        loader = Loader(config, weights, context, self._workspace, peers)
        vectors = loader.vectors()
        self._embedding = loader.embedding(vectors)
        self._network = loader.network(vectors, with_head=with_head)
        cache = CpuCache(layout, num_pages, kv, config.latent.rank if config.latent else 0)
        self._attention = CpuAttention(context, self._workspace, own, cache, loader.head_norms())
        self._drawer = Drawer(context, peers.tensor)
        self.weights_bytes = weights.bytes

    def follow(
        self, rows: Sequence[BatchRow], drawn: Sequence[list[int]], x: Floats, after_layer: AfterLayer
    ) -> Followed:
        """Of a row's tokens the first `row.chained` are in its KV already. Where none is asked for it only keeps up."""
        pending = [(i, span) for i, row in enumerate(rows) if (span := _span(row, drawn[i])).tokens]
        asking = [i for i, _ in pending if rows[i].propose]
        hidden = self._run([span for _, span in pending], after_layer, fill_only=not asking)
        if not asking:
            return Followed([[] for _ in rows], {})
        ends = np.cumsum([len(span.tokens) for _, span in pending])
        last = hidden[[end - 1 for (i, _), end in zip(pending, ends, strict=True) if rows[i].propose]]
        chain = Chain(self._network.logits, lambda spans, _: self._run(spans, None, fill_only=False))
        return Followed(propose(chain, self._drawer, rows, drawn, asking, last), {})

    def _run(self, spans: list[Span], after_layer: AfterLayer, *, fill_only: bool) -> Floats:
        """Their last hidden states."""
        tokens = np.array([token for span in spans for token in span.tokens], np.int32)
        x = self._workspace.floats("hidden", tokens.size, self._config.hidden)
        self._attention.plan(spans)
        self._embedding.embed(tokens, x)
        if self._config.embedding_scale != 1.0:
            x *= np.float32(self._config.embedding_scale)
        self._network.run(x, self._attention, after_layer, fill_only=fill_only)
        return x


def _span(row: BatchRow, drawn: list[int]) -> Span:
    tokens = stood(row, drawn)
    known = min(row.chained, len(tokens))
    return Span(tokens[known:] + (drawn[-1:] if row.propose else []), row.start + known, row.pages)


def check_draft(model: ModelConfig, draft: ModelConfig, directory: Path) -> None:
    """Raises `ModelError` for a draft that cannot propose to the model. (That its tokenizer is the same is `shared.opening`'s to
    see.)"""
    if draft.vocab_size != model.vocab_size:
        raise ModelError(f"{directory}: a draft of {draft.vocab_size} tokens for a model of {model.vocab_size}")
    if draft.max_positions < model.max_positions:
        raise ModelError(
            f"{directory}: a draft of {draft.max_positions} positions for a model of {model.max_positions}"
        )
