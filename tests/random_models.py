"""Small models with random weights, in Hugging Face form, of the exact architectures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.tiny_model import BOS, END, TEMPLATE, byte_level

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}

QWEN3_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}

DEEPSEEK_V3 = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN,
}

GEMMA3 = {
    "tie_word_embeddings": False,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
"""Layers of both kinds, a window that is no multiple of a page, and a head that is not tied as it is in the published
ones: with its scaled embedding such a small model would say its last token again and again."""

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3_MOE),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM, DEEPSEEK_V3),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA3),
}

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def save(kind: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes the model to `directory` and returns it. Weights are scaled so that greedy output does not just repeat."""
    config_class, model_class, own = KINDS[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SMALL, **own, **changes}))
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
            else:
                parameter += torch.empty_like(parameter).normal_(0, 0.5 if name.endswith("bias") else 0.2)
                parameter.copy_(parameter.bfloat16())  # vectors stay float32 where matrices are rounded
    model.to(torch.float32).save_pretrained(directory)
    return directory


def save_mtp(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """DeepSeek-V3 with one multi-token prediction layer: the last layer of a network of one layer more, with what joins it to
    the others."""
    layers = changes.get("num_hidden_layers", SMALL["num_hidden_layers"])
    save("deepseek-v3", directory, seed=seed, **{**changes, "num_hidden_layers": layers + 1})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    hidden, draw = config["hidden_size"], torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    prefix = f"model.layers.{layers}."
    tensors[prefix + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) * 0.1
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = (1 + 0.2 * torch.randn(hidden, generator=draw)).bfloat16().float()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def save_served(directory: Path, *, kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """One with a tokenizer and a chat template: all that a router, too, needs. `kind` "mtp": as `save_mtp` makes it."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    changes = {"vocab_size": size, "eos_token_id": END, "bos_token_id": BOS, **changes}
    if kind == "mtp":
        save_mtp(directory, seed=seed, **changes)
    else:
        save(kind, directory, seed=seed, **changes)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def main() -> None:
    """A small model to serve: `python -m tests.random_models deepseek-v3 DIRECTORY`."""
    parser = argparse.ArgumentParser(prog="tests.random_models", description=main.__doc__)
    parser.add_argument("kind", choices=[*KINDS, "mtp"])
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(save_served(arguments.directory, kind=arguments.kind))


if __name__ == "__main__":
    main()
