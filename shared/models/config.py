"""What a model is: `config.json` and `generation_config.json` of a Hugging Face directory, checked, as one frozen struct."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec

from shared.layout import KvDtype, KvLayout
from shared.models.experts import Experts, read_deepseek_experts, read_qwen_experts
from shared.models.fields import Fields
from shared.models.latent import Latent, read_latent
from shared.models.rope import Rope, read_rope
from shared.models.window import Window, read_global_rope, read_window

Architecture = Literal[
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
]
WeightsDtype = Literal["float32", "bfloat16"]
Activation = Literal["silu", "gelu_tanh"]

ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

FP8_BLOCK = 128
"""Rows and columns of a weight that share one scale in an fp8 checkpoint."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: Architecture
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of what the cache keeps for a head: with `latent`, all of it."""
    intermediate: int
    """Of dense feed-forwards."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    """Of attention's output projection."""
    mlp_bias: bool
    head_norms: bool
    """RMS norms over each head of q and k, before the rotary embedding (Qwen3, Gemma 3)."""
    score_scale: float
    """Of q . k."""
    eos_ids: list[int]
    """Every token that ends an output, from both files, without repeats."""
    bos_id: int | None
    dtype: WeightsDtype
    """Of the checkpoint; float16 counts as float32, which holds it exactly."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """Added to the weights of every norm as they are stored (Gemma)."""
    post_norms: bool = False
    """A norm of what attention and feed-forward add, besides that of what they are given (Gemma)."""
    experts: Experts | None = None
    latent: Latent | None = None
    window: Window | None = None
    mtp_layers: int = 0
    """Multi-token prediction layers after the network's (DeepSeek-V3)."""

    def layout(
        self, *, page_size: int, dtype: KvDtype, mtp: bool = False, draft: ModelConfig | None = None
    ) -> KvLayout:
        """KV layout of this model, unsharded; with `mtp` also of its first multi-token prediction layer; and of `draft`."""
        return KvLayout(
            num_layers=self.layers + mtp,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            kind="mla" if self.latent else "gqa",
            draft=draft.layout(page_size=page_size, dtype=dtype) if draft else None,
        )


def load_config(directory: Path) -> ModelConfig:
    """The model in `directory`. Raises `ModelError` where it cannot be read, or names what is not supported."""
    raw = Fields.read(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = Fields.read(generation_path) if generation_path.exists() else Fields({}, generation_path)
    architecture = _architecture(raw)
    _refuse_unsupported(raw, architecture)
    config = ModelConfig(
        architecture=architecture,
        hidden=raw.positive("hidden_size"),
        layers=raw.positive("num_hidden_layers"),
        heads=raw.positive("num_attention_heads"),
        kv_heads=raw.positive("num_key_value_heads", raw.positive("num_attention_heads")),
        head_dim=_head_dim(raw, architecture),
        intermediate=raw.positive("intermediate_size"),
        vocab_size=raw.positive("vocab_size"),
        max_positions=raw.positive("max_position_embeddings", 2048),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=read_global_rope(raw) if architecture == "Gemma3ForCausalLM" else read_rope(raw),
        tied_embeddings=raw.flag("tie_word_embeddings"),
        qkv_bias=raw.flag("attention_bias"),
        out_bias=raw.flag("attention_bias"),
        mlp_bias=raw.flag("mlp_bias"),
        head_norms=False,
        score_scale=_head_dim(raw, architecture) ** -0.5,
        eos_ids=list(dict.fromkeys(raw.ids("eos_token_id") + generation.ids("eos_token_id"))),
        bos_id=next(iter(raw.ids("bos_token_id") + generation.ids("bos_token_id")), None),
        dtype=_dtype(raw),
    )
    config = _with_its_own(config, raw)
    _check_shapes(config, raw)
    return config


def _with_its_own(config: ModelConfig, raw: Fields) -> ModelConfig:
    """What sets the architecture apart from Llama."""
    replace = msgspec.structs.replace
    match config.architecture:
        case "LlamaForCausalLM":
            return config
        case "Qwen2ForCausalLM":
            return replace(config, qkv_bias=True, out_bias=False)
        case "Qwen3ForCausalLM":
            return replace(config, head_norms=True)
        case "Qwen3MoeForCausalLM":
            return replace(config, head_norms=True, experts=read_qwen_experts(raw, config.layers))
        case "DeepseekV3ForCausalLM":
            return _deepseek(config, raw)
        case "Gemma3ForCausalLM":
            return _gemma(config, raw)


def _deepseek(config: ModelConfig, raw: Fields) -> ModelConfig:
    raw.one_of("attention_bias", False, False)
    latent = read_latent(raw)
    mtp_layers = raw.count("num_nextn_predict_layers", 0)
    return msgspec.structs.replace(
        config,
        kv_heads=1,
        head_dim=latent.cached_dim,
        score_scale=latent.query_dim**-0.5 * config.rope.score_scale,
        experts=read_deepseek_experts(raw, config.layers + mtp_layers),
        mtp_layers=mtp_layers,
        latent=latent,
    )


def _gemma(config: ModelConfig, raw: Fields) -> ModelConfig:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        raw.one_of(field, None, None)
    raw.one_of("use_bidirectional_attention", False, False)
    return msgspec.structs.replace(
        config,
        head_norms=True,
        tied_embeddings=raw.flag("tie_word_embeddings", default=True),
        window=read_window(raw, config.layers),
        score_scale=raw.number("query_pre_attn_scalar", 256.0) ** -0.5,
        activation="gelu_tanh",
        embedding_scale=config.hidden**0.5,
        norm_offset=1.0,
        post_norms=True,
    )


def _architecture(raw: Fields) -> Architecture:
    named = raw.values.get("architectures") or [None]
    for architecture in ARCHITECTURES:
        if named[0] == architecture:
            return architecture
    raise raw.refuse("architectures", named, " or ".join(ARCHITECTURES))


def _head_dim(raw: Fields, architecture: Architecture) -> int:
    defaults = {"Qwen3ForCausalLM": 128, "Gemma3ForCausalLM": 256}
    divided = max(1, raw.positive("hidden_size") // raw.positive("num_attention_heads"))
    return raw.positive("head_dim", defaults.get(architecture, divided))


def _refuse_unsupported(raw: Fields, architecture: Architecture) -> None:
    """Fields that change the network in ways that are not implemented."""
    _check_quantization(raw)
    if (partial := raw.values.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise raw.refuse("partial_rotary_factor", partial, "1.0")
    if architecture == "Gemma3ForCausalLM":
        raw.one_of("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
        return
    raw.one_of("hidden_act", "silu", "silu")
    if raw.values.get("use_sliding_window") and raw.has("sliding_window"):
        raise raw.refuse("sliding_window", raw.values["sliding_window"], "full attention")
    if any(kind != "full_attention" for kind in raw.values.get("layer_types") or []):
        raise raw.refuse("layer_types", raw.values["layer_types"], "full_attention in every layer")


def _check_quantization(raw: Fields) -> None:
    quantization = raw.inner("quantization_config")
    blocks = quantization.values.get("weight_block_size")
    if quantization.values and (quantization.values.get("quant_method"), blocks) != ("fp8", [FP8_BLOCK] * 2):
        supported = f"float32, bfloat16 and float16 weights, and fp8 with weight_block_size {[FP8_BLOCK] * 2}"
        raise raw.refuse("quantization_config", quantization.values, supported)


def _dtype(raw: Fields) -> WeightsDtype:
    value = raw.values.get("dtype") or raw.values.get("torch_dtype") or "float32"
    if value == "bfloat16":
        return "bfloat16"
    if value in ("float32", "float16"):
        return "float32"
    raise raw.refuse("dtype", value, "float32, bfloat16 and float16")


def _check_shapes(config: ModelConfig, raw: Fields) -> None:
    if config.heads % config.kv_heads:
        raise raw.refuse("num_key_value_heads", config.kv_heads, f"a divisor of num_attention_heads={config.heads}")
    if config.head_dim % 2 and config.latent is None:
        raise raw.refuse("head_dim", config.head_dim, "an even number")
    for token in config.eos_ids:
        if token >= config.vocab_size:
            raise raw.refuse("eos_token_id", token, f"below vocab_size={config.vocab_size}")
