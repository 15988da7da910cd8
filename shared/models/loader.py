"""The network of a checkpoint, built of the CPU's modules."""

from __future__ import annotations

from shared.models import _kernels
from shared.models.config import ModelConfig
from shared.models.cpu import CpuNorm, CpuProjection, Floats, HeadNorms, NormedBranch, Workspace
from shared.models.cpu_experts import CpuExperts
from shared.models.latent_loader import LatentLoader
from shared.models.network import Block, Branch, Dense, Network, Projection
from shared.models.weights import Weights


class Loader:
    def __init__(self, config: ModelConfig, weights: Weights, context: _kernels.Context, workspace: Workspace) -> None:
        self._config, self._weights, self._context, self._workspace = config, weights, context, workspace
        self._latent = LatentLoader(config, config.latent, weights, context, workspace) if config.latent else None

    def embedding(self) -> _kernels.Linear:
        """`[vocab, hidden]`; packed as a projection, because a tied head is the same matrix."""
        return self._weights.linear(["model.embed_tokens"], [self._config.vocab_size], self._config.hidden)

    def network(self, embedding: _kernels.Linear, *, with_head: bool) -> Network[Floats]:
        config = self._config
        blocks = [self._block(layer) for layer in range(config.layers)]
        norm = self._norm("model.norm")
        if config.tied_embeddings:
            return Network(blocks, norm, self._projection(embedding, "logits"))
        head = self._weights.linear(["lm_head"], [config.vocab_size], config.hidden) if with_head else None
        return Network(blocks, norm, self._projection(head, "logits") if head else None)

    def head_norms(self) -> list[HeadNorms]:
        """Of each layer."""
        return [self._head_norms(f"model.layers.{layer}.self_attn.") for layer in range(self._config.layers)]

    def _head_norms(self, prefix: str) -> HeadNorms:
        if self._latent:
            return HeadNorms(None, self._latent.norm(prefix))
        if not self._config.head_norms:
            return HeadNorms(None, None)
        q, k = (self._norm_weight(prefix + name, self._config.head_dim) for name in ("q_norm", "k_norm"))
        return HeadNorms(q, k)

    def _block(self, layer: int) -> Block[Floats]:
        prefix = f"model.layers.{layer}."
        qkv, out = self._attention(prefix + "self_attn.")
        mlp = self._feed_forward(layer, prefix + "mlp.")
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
        names = [prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        qkv = self._weights.linear(names, [q, kv, kv], c.hidden, bias=c.qkv_bias)
        out = self._weights.linear([prefix + "o_proj"], [c.hidden], q, bias=c.out_bias)
        return self._projection(qkv, "qkv"), self._projection(out, "out")

    def _feed_forward(self, layer: int, prefix: str) -> Branch[Floats]:
        c = self._config
        if c.experts is None or not c.experts.sparse[layer]:
            return self._dense(prefix, c.intermediate)
        pairs = [self._pair(f"{prefix}experts.{i}.", c.experts.intermediate) for i in range(c.experts.count)]
        gate = self._projection(self._weights.exact(prefix + "gate", c.experts.count, c.hidden), "scores")
        bias = f"{prefix}gate.e_score_correction_bias"
        shared = c.experts.shared_intermediate
        return CpuExperts(
            self._context,
            c.experts,
            gate,
            self._weights.vector(bias, c.experts.count) if c.experts.sigmoid else None,
            _kernels.Experts([pair[0] for pair in pairs], [pair[1] for pair in pairs]),
            self._dense(prefix + "shared_experts.", shared) if shared else None,
        )

    def _dense(self, prefix: str, intermediate: int) -> Branch[Floats]:
        gate_up, down = self._pair(prefix, intermediate)
        return Dense(self._projection(gate_up, "gated"), self._projection(down, "out"))

    def _pair(self, prefix: str, intermediate: int) -> tuple[_kernels.Linear, _kernels.Linear]:
        """A gated linear, and the way back."""
        c = self._config
        gate_up = self._weights.gated(prefix, intermediate, c.hidden, c.activation, bias=c.mlp_bias)
        return gate_up, self._weights.linear([prefix + "down_proj"], [c.hidden], intermediate, bias=c.mlp_bias)

    def _projection(self, linear: _kernels.Linear, name: str) -> CpuProjection:
        return CpuProjection(self._context, self._workspace, linear, name)

    def _norm(self, name: str) -> CpuNorm:
        weight = self._norm_weight(name, self._config.hidden)
        return CpuNorm(self._context, self._workspace, weight, self._config.norm_eps)

    def _norm_weight(self, name: str, size: int) -> Floats:
        weight = self._weights.vector(name + ".weight", size)
        weight += self._config.norm_offset
        return weight
