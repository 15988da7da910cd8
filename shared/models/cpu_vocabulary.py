"""The two ends of the network that know the vocabulary, whole or split over a tensor parallel group by token."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.models import _kernels
from shared.models.collective import Collective
from shared.models.cpu import CpuProjection, Floats, Workspace
from shared.models.shard import Shard

Tokens = npt.NDArray[np.int32]


class Embedding(Protocol):
    def embed(self, tokens: Tokens, out: Floats) -> None:
        """Their vectors into `out`, `[tokens, hidden]`; the same bits in all ranks. Tokens are in the vocabulary."""
        ...


class WholeEmbedding:
    def __init__(self, context: _kernels.Context, linear: _kernels.Linear) -> None:
        self._context, self._linear = context, linear

    def embed(self, tokens: Tokens, out: Floats) -> None:
        self._linear.embed(self._context, tokens, out)


class SplitEmbedding:
    """`linear` has the vectors of the tokens `here`; those of others are zero until the ranks have summed."""

    def __init__(
        self, context: _kernels.Context, workspace: Workspace, linear: _kernels.Linear, peers: Collective, here: slice
    ) -> None:
        self._context, self._workspace, self._linear = context, workspace, linear
        self._peers, self._here = peers, here

    def embed(self, tokens: Tokens, out: Floats) -> None:
        (rows,) = np.nonzero((tokens >= self._here.start) & (tokens < self._here.stop))
        vectors = self._workspace.floats("embedded", rows.size, out.shape[1])
        self._linear.embed(self._context, tokens[rows] - np.int32(self._here.start), vectors)
        out[:] = 0.0
        out[rows] = vectors
        self._peers.all_reduce_sum(out)


class SplitHead:
    """A `Projection` to logits of which `local` has this rank's part; all ranks call it together. Rank 0 gets all logits,
    `[rows, vocab]`, another rank those of its own tokens."""

    def __init__(self, workspace: Workspace, local: CpuProjection, peers: Collective, vocab: int) -> None:
        self._workspace, self._local, self._peers = workspace, local, peers
        parts = [Shard(rank=rank, ranks=peers.ranks).part(vocab) for rank in range(peers.ranks)]
        self._parts, self._vocab = parts, vocab
        self._widest = max(part.stop - part.start for part in parts)

    def __call__(self, x: Floats) -> Floats:
        own, rows, lead = self._local(x), x.shape[0], self._peers.rank == 0
        sent = self._workspace.floats("own logits", rows, self._widest)
        sent[:, : own.shape[1]] = own
        sent[:, own.shape[1] :] = 0.0
        gathered = self._workspace.floats("gathered logits", rows * self._peers.ranks if lead else 0, self._widest)
        self._peers.gather(sent, gathered)
        if not lead:
            return own
        logits = self._workspace.floats("logits", rows, self._vocab)
        for part, came in zip(self._parts, gathered.reshape(-1, rows, self._widest), strict=True):
            logits[:, part] = came[:, : part.stop - part.start]
        return logits
