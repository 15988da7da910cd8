"""Weights from a checkpoint into the CPU's packed form, and the network built of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.models import _kernels
from shared.models.checkpoint import Checkpoint, Stored
from shared.models.config import ModelConfig, WeightsDtype
from shared.models.cpu import CpuNorm, CpuProjection, Floats, HeadNorms, Workspace
from shared.models.network import Block, Network


class Loader:
    """Every matrix is packed once, as it is read: besides the packed weights one tensor is in memory at a time."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        context: _kernels.Context,
        workspace: Workspace,
        dtype: WeightsDtype,
    ) -> None:
        self._config, self._checkpoint, self._context = config, checkpoint, context
        self._workspace, self._dtype = workspace, dtype
        self.weights_bytes = 0

    def embedding(self) -> _kernels.Linear:
        """`[vocab, hidden]`; packed as a projection, because a tied head is the same matrix."""
        return self._linear(["model.embed_tokens"], [self._config.vocab_size], self._config.hidden)

    def network(self, embedding: _kernels.Linear, *, with_head: bool) -> Network[Floats]:
        config = self._config
        blocks = [self._block(f"model.layers.{layer}.") for layer in range(config.layers)]
        norm = self._norm("model.norm")
        if config.tied_embeddings:
            return Network(blocks, norm, self._projection(embedding, "logits"))
        head = self._linear(["lm_head"], [config.vocab_size], config.hidden) if with_head else None
        return Network(blocks, norm, self._projection(head, "logits") if head else None)

    def head_norms(self) -> list[HeadNorms] | None:
        if not self._config.head_norms:
            return None
        dim = (self._config.head_dim,)
        return [
            HeadNorms(
                self._vector(f"model.layers.{layer}.self_attn.q_norm.weight", dim),
                self._vector(f"model.layers.{layer}.self_attn.k_norm.weight", dim),
            )
            for layer in range(self._config.layers)
        ]

    def _block(self, prefix: str) -> Block[Floats]:
        c = self._config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        names = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
        qkv = self._linear(names, [q, kv, kv], c.hidden, bias=c.attention_bias)
        out = self._linear([attention + "o_proj"], [c.hidden], q, bias=c.attention_bias)
        halves = [mlp + "gate_proj", mlp + "up_proj"]
        gate_up = self._linear(halves, [c.intermediate] * 2, c.hidden, bias=c.mlp_bias, gated=True)
        down = self._linear([mlp + "down_proj"], [c.hidden], c.intermediate, bias=c.mlp_bias)
        return Block(
            attention_norm=self._norm(prefix + "input_layernorm"),
            qkv=self._projection(qkv, "qkv"),
            out=self._projection(out, "out"),
            mlp_norm=self._norm(prefix + "post_attention_layernorm"),
            gate_up=self._projection(gate_up, "gated"),
            down=self._projection(down, "out"),
        )

    def _projection(self, linear: _kernels.Linear, name: str) -> CpuProjection:
        return CpuProjection(self._context, self._workspace, linear, name)

    def _norm(self, name: str) -> CpuNorm:
        weight = self._vector(name + ".weight", (self._config.hidden,))
        return CpuNorm(self._context, self._workspace, weight, self._config.norm_eps)

    def _vector(self, name: str, shape: tuple[int, ...]) -> Floats:
        return np.ascontiguousarray(self._checkpoint.read(name, shape).as_float32())

    def _linear(
        self, names: Sequence[str], outputs: Sequence[int], inputs: int, *, bias: bool = False, gated: bool = False
    ) -> _kernels.Linear:
        """The matrices `names`, one below the other."""
        linear = _kernels.Linear(self._context, sum(outputs), inputs, self._dtype, gated=gated)
        first = 0
        for name, rows in zip(names, outputs, strict=True):
            _fill(linear, first, self._checkpoint.read(name + ".weight", (rows, inputs)))
            if bias:
                linear.fill_bias(first, self._vector(name + ".bias", (rows,)))
            first += rows
        self.weights_bytes += linear.bytes
        return linear


def _fill(linear: _kernels.Linear, first: int, stored: Stored) -> None:
    if stored.dtype == "float32":
        linear.fill(first, stored.values)
    else:
        linear.fill_half(first, stored.values, stored.dtype)
