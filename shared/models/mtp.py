"""DeepSeek-V3's multi-token prediction layer as a drafter (technical report, arXiv 2412.19437, section 2.2).

One more transformer block, after the model's. At position i it is given the model's last hidden state h of position i, after the
final norm, and the embedding e of token i + 1; x = W [norm(e); norm(h)] goes through the block, and its own norm and the model's
head give token i + 2. To propose more than one it goes on from its own hidden state, after its norm, as if that were the model's.
The order in W, e before h, and that h is taken after the norm, are those of the published checkpoints (`eh_proj`, `enorm`,
`hnorm`, `shared_head.norm`); embedding and head are the model's own, of which the checkpoints have copies.

Its KV is one more layer of the model's. It has that of position i when token i + 1 is known: after a step of all positions whose
tokens stand. A prefiller computes no token after the last that it runs, so the decoder's first step computes one position more
than its row has, for which it is given h (`BatchRow.hidden`). Of proposed tokens it keeps nothing: their positions are computed
again, with the model's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.models import _kernels
from shared.models.attention import BatchRow
from shared.models.collective import Peers
from shared.models.config import ModelConfig
from shared.models.cpu import CpuAttention, CpuNorm, CpuProjection, Floats, Workspace
from shared.models.cpu_vocabulary import Embedding
from shared.models.drafter import AfterLayer, Chain, Drawer, Followed, Span, propose, stood
from shared.models.loader import Loader
from shared.models.network import Network
from shared.models.weights import Part, Weights


class Mtp:
    """A `shared.models.drafter.Drafter`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        context: _kernels.Context,
        workspace: Workspace,
        peers: Peers,
        *,
        model: Network[Floats],
        embedding: Embedding,
        attention: CpuAttention,
    ) -> None:
        """`model`, `embedding`: those it works beside. `attention`: theirs, with one layer more. Its experts are split over the
        tensor parallel group, wherever the model's are: with data parallelism every group has all of them."""
        layer, prefix = config.layers, f"model.layers.{config.layers}."
        loader = Loader(config, weights, context, workspace, Peers(tensor=peers.tensor))
        self._model_norm, self._embedding, self._attention = model.norm, embedding, attention
        self._workspace, self._hidden, self._drawer = workspace, config.hidden, Drawer(context, peers.tensor)

        def norm(name: str) -> CpuNorm:
            return CpuNorm(context, workspace, weights.vector(f"{prefix}{name}.weight", config.hidden), config.norm_eps)

        self._enorm, self._hnorm, self._norm = norm("enorm"), norm("hnorm"), norm("shared_head.norm")
        mixing = weights.linear([Part(prefix + "eh_proj", config.hidden, 2 * config.hidden)])
        self._mix = CpuProjection(context, workspace, mixing, "mixed")
        fence = peers.tensor.barrier if peers.tensor else None
        self._network = Network([loader.block(layer)], self._norm, model.head, fence, layer)

    def follow(
        self, rows: Sequence[BatchRow], drawn: Sequence[list[int]], x: Floats, after_layer: AfterLayer
    ) -> Followed:
        states = self._model_norm(x).copy()
        begins = np.cumsum([0, *(len(row.tokens) for row in rows)])
        works = [_work(row, drawn[i], states[begins[i] : begins[i + 1]]) for i, row in enumerate(rows)]
        last = {
            i: states[begins[i + 1] - 1].astype("<f4").tobytes()
            for i, row in enumerate(rows)
            if row.sample is None and row.following is None
        }
        pending = [i for i, (span, _) in enumerate(works) if span.tokens]
        asking = [i for i in pending if rows[i].propose]
        if not pending:
            if after_layer is not None:
                after_layer()
            return Followed([[] for _ in rows], last)
        hidden = np.concatenate([works[i][1] for i in pending])
        out = self._run([works[i][0] for i in pending], hidden, after_layer, fill_only=not asking)
        if not asking:
            return Followed([[] for _ in rows], last)
        ends = np.cumsum([len(works[i][0].tokens) for i in pending])
        states = out[[end - 1 for i, end in zip(pending, ends, strict=True) if rows[i].propose]]
        chain = Chain(self._logits, lambda spans, h: self._run(spans, h, None, fill_only=False), behind=1)
        return Followed(propose(chain, self._drawer, rows, drawn, asking, states), last)

    def _run(self, spans: list[Span], hidden: Floats, after_layer: AfterLayer, *, fill_only: bool) -> Floats:
        """Its hidden states after its norm; each span's tokens are those after its positions, `hidden` the states at them."""
        tokens = np.array([token for span in spans for token in span.tokens], np.int32)
        self._attention.plan(spans)
        embedded = self._workspace.floats("next embedded", tokens.size, self._hidden)
        self._embedding.embed(tokens, embedded)
        both = self._workspace.floats("both", tokens.size, 2 * self._hidden)
        both[:, : self._hidden] = self._enorm(embedded)
        both[:, self._hidden :] = self._hnorm(np.ascontiguousarray(hidden))
        x = self._mix(both)
        self._network.run(x, self._attention, after_layer, fill_only=fill_only)
        return x if fill_only else self._norm(x).copy()

    def _logits(self, states: Floats) -> Floats:
        if self._network.head is None:
            raise ValueError("this model was loaded without its output head")
        return self._network.head(np.ascontiguousarray(states))


def _work(row: BatchRow, drawn: list[int], states: Floats) -> tuple[Span, Floats]:
    """The positions whose next token is known now: those tokens, and the model's hidden states at them."""
    tokens = stood(row, drawn)
    after = tokens[1:] + (
        drawn[-1:] if row.sample is not None else [row.following] if row.following is not None else []
    )
    states = states[: len(after)]
    if not row.hidden:
        return Span(after, row.start, row.pages), states
    before = np.frombuffer(row.hidden, "<f4").reshape(1, states.shape[1])
    return Span([tokens[0], *after], row.start - 1, row.pages), np.concatenate([before, states])
