"""What a model is: `config.json` and `generation_config.json` of a Hugging Face directory, checked, as one frozen struct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ModelError
from shared.layout import KvDtype, KvLayout

Architecture = Literal["LlamaForCausalLM", "Qwen3ForCausalLM"]
WeightsDtype = Literal["float32", "bfloat16"]

ARCHITECTURES: tuple[Architecture, ...] = ("LlamaForCausalLM", "Qwen3ForCausalLM")


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: frequency i of head_dim / 2 is theta^(-2i / head_dim), then scaled.

    "linear" divides every frequency by `factor`. "llama3" divides the low ones by `factor`, keeps the high ones and
    blends between (Llama 3.1's rule; `low_freq_factor`, `high_freq_factor`, `original_positions`).
    """

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: Architecture
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    """Of q, k, v and the output projection."""
    mlp_bias: bool
    head_norms: bool
    """RMS norms over each head of q and k, before the rotary embedding (Qwen3)."""
    eos_ids: list[int]
    """Every token that ends an output, from both files, without repeats."""
    bos_id: int | None
    dtype: WeightsDtype
    """Of the checkpoint; float16 counts as float32, which holds it exactly."""

    def layout(self, *, page_size: int, dtype: KvDtype) -> KvLayout:
        """KV layout of this model, unsharded."""
        return KvLayout(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
        )


def load_config(directory: Path) -> ModelConfig:
    """The model in `directory`. Raises `ModelError` where it cannot be read, or names what is not supported."""
    raw = _Fields(_read_json(directory / "config.json"), directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = _Fields(_read_json(generation_path) if generation_path.exists() else {}, generation_path)
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    heads, hidden = raw.positive("num_attention_heads"), raw.positive("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        hidden=hidden,
        layers=raw.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=raw.positive("num_key_value_heads", heads),
        head_dim=raw.positive("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads),
        intermediate=raw.positive("intermediate_size"),
        vocab_size=raw.positive("vocab_size"),
        max_positions=raw.positive("max_position_embeddings", 2048),
        norm_eps=raw.number("rms_norm_eps", 1e-6),
        rope=_rope(raw),
        tied_embeddings=raw.flag("tie_word_embeddings"),
        attention_bias=raw.flag("attention_bias"),
        mlp_bias=raw.flag("mlp_bias"),
        head_norms=architecture == "Qwen3ForCausalLM",
        eos_ids=list(dict.fromkeys(raw.ids("eos_token_id") + generation.ids("eos_token_id"))),
        bos_id=next(iter(raw.ids("bos_token_id") + generation.ids("bos_token_id")), None),
        dtype=_dtype(raw),
    )
    _check_shapes(config, raw)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


class _Fields:
    """A JSON object whose fields are read with their types checked."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def refuse(self, field: str, value: object, supported: str) -> ModelError:
        return ModelError(f"{self.path}: {field}={value!r} is not supported: {supported}")

    def positive(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        if value is None and default is not None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(field, value, "a whole number of at least 1")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.refuse(field, value, "a number above 0")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.values.get(field, False)
        if not isinstance(value, bool):
            raise self.refuse(field, value, "true or false")
        return value

    def ids(self, field: str) -> list[int]:
        value = self.values.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise self.refuse(field, value, "a token id or a list of them")
        return ids


def _architecture(raw: _Fields) -> Architecture:
    named = raw.values.get("architectures") or [None]
    for architecture in ARCHITECTURES:
        if named[0] == architecture:
            return architecture
    raise raw.refuse("architectures", named, " or ".join(ARCHITECTURES))


def _refuse_unsupported(raw: _Fields) -> None:
    """Fields that change the network in ways that are not implemented."""
    get = raw.values.get
    if (act := get("hidden_act", "silu")) != "silu":
        raise raw.refuse("hidden_act", act, "silu")
    if (quantization := get("quantization_config")) is not None:
        raise raw.refuse("quantization_config", quantization, "float32, bfloat16 and float16 weights")
    if get("use_sliding_window") and get("sliding_window") is not None:
        raise raw.refuse("sliding_window", get("sliding_window"), "full attention")
    if any(kind != "full_attention" for kind in get("layer_types") or []):
        raise raw.refuse("layer_types", get("layer_types"), "full_attention in every layer")
    if (partial := get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise raw.refuse("partial_rotary_factor", partial, "1.0")


def _rope(raw: _Fields) -> Rope:
    """Both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`, which holds both."""
    values = dict(raw.values.get("rope_scaling") or {}) | dict(raw.values.get("rope_parameters") or {})
    fields = _Fields(values, raw.path)
    theta = fields.number("rope_theta", raw.number("rope_theta", 10000.0))
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=fields.number("factor", 1.0))
    if kind != "llama3":
        raise raw.refuse("rope_scaling", values, "default, linear and llama3")
    return Rope(
        theta=theta,
        scaling="llama3",
        factor=fields.number("factor", 1.0),
        low_freq_factor=fields.number("low_freq_factor", 1.0),
        high_freq_factor=fields.number("high_freq_factor", 4.0),
        original_positions=fields.positive(
            "original_max_position_embeddings", raw.positive("max_position_embeddings", 2048)
        ),
    )


def _dtype(raw: _Fields) -> WeightsDtype:
    value = raw.values.get("dtype") or raw.values.get("torch_dtype") or "float32"
    if value == "bfloat16":
        return "bfloat16"
    if value in ("float32", "float16"):
        return "float32"
    raise raw.refuse("dtype", value, "float32, bfloat16 and float16")


def _check_shapes(config: ModelConfig, raw: _Fields) -> None:
    if config.heads % config.kv_heads:
        raise raw.refuse("num_key_value_heads", config.kv_heads, f"a divisor of num_attention_heads={config.heads}")
    if config.head_dim % 2:
        raise raw.refuse("head_dim", config.head_dim, "an even number")
    for token in config.eos_ids:
        if token >= config.vocab_size:
            raise raw.refuse("eos_token_id", token, f"below vocab_size={config.vocab_size}")
