"""Small models with random weights, in Hugging Face form, of the exact architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False}),
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
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.to(torch.float32).save_pretrained(directory)
    return directory
