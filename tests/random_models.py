"""Small models with random weights, in Hugging Face form, of the exact architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.tiny_model import BOS, END, TEMPLATE, byte_level

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


def save_served(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A Llama with a tokenizer and a chat template: all that a router, too, needs."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    save("llama", directory, seed=seed, **{"vocab_size": size, "eos_token_id": END, "bos_token_id": BOS, **changes})
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
