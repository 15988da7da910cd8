"""The network of a checkpoint, built of the CPU's modules."""

from __future__ import annotations

from shared.models import _kernels
from shared.models.collective import Peers
from shared.models.config import ModelConfig
from shared.models.cpu import CpuNorm, CpuProjection, Floats, HeadNorms, NormedBranch, ReducedBranch, Workspace
from shared.models.cpu_experts import CpuExperts, LocalExperts, RoutedExperts, SpreadExperts
from shared.models.cpu_vocabulary import Embedding, SplitEmbedding, SplitHead, WholeEmbedding
from shared.models.experts import Experts
from shared.models.latent_loader import LatentLoader
from shared.models.network import Block, Branch, Dense, Network, Projection
from shared.models.shard import shard_of
from shared.models.weights import ALL, Part, Weights


class Loader:
    """Of the whole network, or of one rank's share: heads, inner dimensions and the vocabulary are split, attention and
    feed-forward each end in a sum over `peers.tensor`, and the rest is the same in all its ranks, but that only rank 0 has
    the biases that follow a sum. Routed experts are split like feed-forwards, or spread whole over `peers.experts`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        context: _kernels.Context,
        workspace: Workspace,
        peers: Peers = Peers(),  # noqa: B008 - immutable
    ) -> None:
        self._config, self._weights, self._context, self._workspace = config, weights, context, workspace
        self._peers = peers
        self._shard = shard = shard_of(peers)
        heads = shard.part(config.heads)
        self._latent = LatentLoader(config, heads, weights, context, workspace) if config.latent else None

    def vectors(self) -> _kernels.Linear:
        """Of the tokens that are here, `[tokens, hidden]`; packed as a projection, because a tied head is the same matrix."""
        return self._vocabulary("model.embed_tokens")

    def embedding(self, vectors: _kernels.Linear) -> Embedding:
        tensor = self._peers.tensor
        if tensor is None:
            return WholeEmbedding(self._context, vectors)
        here = self._shard.part(self._config.vocab_size)
        return SplitEmbedding(self._context, self._workspace, vectors, tensor, here)

    def network(self, vectors: _kernels.Linear, *, with_head: bool) -> Network[Floats]:
        config, tensor = self._config, self._peers.tensor
        blocks = [self.block(layer) for layer in range(config.layers)]
        norm = self._norm("model.norm")
        fence = tensor.barrier if tensor else None
        if config.tied_embeddings:
            return Network(blocks, norm, self._head(vectors), fence)
        return Network(blocks, norm, self._head(self._vocabulary("lm_head")) if with_head else None, fence)

    def _vocabulary(self, name: str) -> _kernels.Linear:
        config = self._config
        return self._weights.linear([Part(name, config.vocab_size, config.hidden, self._shard.part(config.vocab_size))])

    def _head(self, linear: _kernels.Linear) -> Projection[Floats]:
        tensor = self._peers.tensor
        if tensor is None:
            return self._projection(linear, "logits")
        local = self._projection(linear, "local logits")
        return SplitHead(self._workspace, local, tensor, self._config.vocab_size)

    def head_norms(self, layers: int | None = None) -> list[HeadNorms]:
        """Of the first `layers` layers; None: of all of the network's."""
        count = self._config.layers if layers is None else layers
        return [self._head_norms(f"model.layers.{layer}.self_attn.") for layer in range(count)]

    def _head_norms(self, prefix: str) -> HeadNorms:
        if self._latent:
            return HeadNorms(None, self._latent.norm(prefix))
        if not self._config.head_norms:
            return HeadNorms(None, None)
        q, k = (self._norm_weight(prefix + name, self._config.head_dim) for name in ("q_norm", "k_norm"))
        return HeadNorms(q, k)

    def block(self, layer: int) -> Block[Floats]:
        prefix = f"model.layers.{layer}."
        qkv, out = self._attention(prefix + "self_attn.")
        mlp = self._reduced(self._feed_forward(layer, prefix + "mlp."))
        out = self._reduced(out)
        mlp_norm = "post_attention_layernorm"
        if self._config.post_norms:
            out = NormedBranch(self._workspace, out, self._norm(prefix + "post_attention_layernorm"))
            mlp = NormedBranch(self._workspace, mlp, self._norm(prefix + "post_feedforward_layernorm"))
            mlp_norm = "pre_feedforward_layernorm"
        return Block(
            attention_norm=self._norm(prefix + "input_layernorm"),
            qkv=qkv,
            out=out,
            mlp_norm=self._norm(prefix + mlp_norm),
            mlp=mlp,
        )

    def _attention(self, prefix: str) -> tuple[Projection[Floats], Branch[Floats]]:
        c = self._config
        if self._latent:
            return self._latent.attention(prefix)
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        heads = _times(self._shard.part(c.heads), c.head_dim)
        kv_heads = _times(self._shard.kv_heads(c.kv_heads), c.head_dim)
        parts = [Part(prefix + "q_proj", q, c.hidden, heads)]
        parts += [Part(prefix + name, kv, c.hidden, kv_heads) for name in ("k_proj", "v_proj")]
        qkv = self._weights.linear(parts, bias=c.qkv_bias)
        out = self._back(prefix + "o_proj", q, heads, bias=c.out_bias)
        return self._projection(qkv, "qkv"), self._projection(out, "out")

    def _feed_forward(self, layer: int, prefix: str) -> Branch[Floats]:
        c = self._config
        if c.experts is None or not c.experts.sparse[layer]:
            return self._dense(prefix, c.intermediate)
        gate = self._projection(self._weights.exact(prefix + "gate", c.experts.count, c.hidden), "scores")
        bias = f"{prefix}gate.e_score_correction_bias"
        shared = c.experts.shared_intermediate
        return CpuExperts(
            self._context,
            c.experts,
            gate,
            self._weights.vector(bias, c.experts.count) if c.experts.sigmoid else None,
            self._routed(prefix, c.experts),
            self._dense(prefix + "shared_experts.", shared) if shared else None,
        )

    def _routed(self, prefix: str, experts: Experts) -> RoutedExperts:
        here, spread = self._shard.experts(experts.count), self._peers.experts
        taken = self._shard.part(experts.intermediate) if spread is None else ALL
        pairs = [self._pair(f"{prefix}experts.{i}.", experts.intermediate, taken) for i in here]
        gate_up, down = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        kernels = _kernels.Experts(gate_up, down, first=here.start, total=experts.count)
        local = LocalExperts(self._context, kernels)
        return local if spread is None else SpreadExperts(local, self._workspace, spread, self._shard, experts)

    def _dense(self, prefix: str, intermediate: int) -> Branch[Floats]:
        gate_up, down = self._pair(prefix, intermediate, self._shard.part(intermediate))
        return Dense(self._projection(gate_up, "gated"), self._projection(down, "out"))

    def _pair(self, prefix: str, intermediate: int, taken: slice) -> tuple[_kernels.Linear, _kernels.Linear]:
        """A gated linear, and the way back; `taken` of the inner dimension."""
        c = self._config
        gate, up = (Part(prefix + name, intermediate, c.hidden, taken) for name in ("gate_proj", "up_proj"))
        gate_up = self._weights.gated(gate, up, c.activation, bias=c.mlp_bias)
        return gate_up, self._back(prefix + "down_proj", intermediate, taken, bias=c.mlp_bias)

    def _back(self, name: str, inputs: int, taken: slice, *, bias: bool) -> _kernels.Linear:
        """To the hidden state, of the inputs taken; the ranks' sum is to have the bias once."""
        part = Part(name, self._config.hidden, inputs, columns=taken)
        return self._weights.linear([part], bias=bias and (taken == ALL or self._shard.rank == 0))

    def _reduced(self, branch: Branch[Floats]) -> Branch[Floats]:
        return ReducedBranch(self._workspace, branch, self._peers.tensor) if self._peers.tensor else branch

    def _projection(self, linear: _kernels.Linear, name: str) -> CpuProjection:
        return CpuProjection(self._context, self._workspace, linear, name)

    def _norm(self, name: str) -> CpuNorm:
        weight = self._norm_weight(name, self._config.hidden)
        return CpuNorm(self._context, self._workspace, weight, self._config.norm_eps)

    def _norm_weight(self, name: str, size: int) -> Floats:
        weight = self._weights.vector(name + ".weight", size)
        weight += self._config.norm_offset
        return weight


def _times(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
