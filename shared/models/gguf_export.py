"""A Llama model in a GGUF file, dequantised into a Hugging Face directory: bfloat16 safetensors, config, tokenizer."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from shared.errors import ModelError

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_CONTROL_TOKEN = 3
"""Token type of GGUF for tokens that are no text."""

_PRE_TOKENIZERS = {"smollm", "gpt-2"}


def export_directory(gguf: Path, target: Path) -> None:
    """Writes `target`, a new directory. Raises `ModelError` for another architecture or kind of tokenizer."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{gguf.name}: architecture {fields.get('general.architecture')!r}; supported is llama")
    target.mkdir()
    _write_json(target / "config.json", _config(fields, tied=all(t.name != "output.weight" for t in reader.tensors)))
    _write_json(target / "generation_config.json", _generation_config(fields))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))
    tokenizer(fields).save(str(target / "tokenizer.json"))
    _write_weights(reader, fields, target / "model.safetensors")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    return {ours: fields[f"tokenizer.ggml.{name}_token_id"] for name, ours in names.items()}


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return _special_ids(fields)


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **{ours: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name, ours in names.items()},
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file's metadata describes. "smollm" splits digits one by one first."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"tokenizer {kind!r}, pre-tokenizer {pre!r}: supported is 'gpt2' with {sorted(_PRE_TOKENIZERS)}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
        if pre == "smollm"
        else by_bytes
    )
    made.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == _CONTROL_TOKEN
        ]
    )
    return made


def _write_weights(reader: GGUFReader, fields: dict[str, Any], path: Path) -> None:
    """Tensor after tensor, so that one is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        begin, end = end, end + 2 * math.prod(shape)
        header[_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor", disable=not sys.stderr.isatty()):
            file.write(_bfloat16(_values(tensor, fields)).tobytes())


def _name(gguf_name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight"""
    *block, name = gguf_name.removesuffix(".weight").split(".")
    return ".".join([*(["model.layers", block[1]] if block else []), _NAMES[name], "weight"])


def _values(tensor: ReaderTensor, fields: dict[str, Any]) -> npt.NDArray[np.float32]:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        kv = "_kv" if tensor.name.endswith("attn_k.weight") else ""
        return _unpermuted(values, fields[f"llama.attention.head_count{kv}"])
    return values


def _unpermuted(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF interleaves the halves of each head of q and k, for a rotary embedding of neighbours; back to halves."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even, as raw bits. The values are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
