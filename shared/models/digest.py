"""A cheap digest by which two instances know that they run the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ModelError

_TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_digest(directory: Path) -> str:
    """32 hex digits over configuration, tokenizer and weights. Of the weights: names, sizes, safetensors headers, and 64
    samples of 4 KiB spread over each file; so it takes milliseconds. Raises `ModelError` where there are none."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXTS:
        path = directory / name
        if path.is_file():
            _update(digest, name, path.read_bytes())
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{directory}: no *.safetensors")
    for path in weights:
        _update(digest, path.name, _sampled(path))
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, name: str, content: bytes) -> None:
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        parts = [size.to_bytes(8, "little"), file.read(min(header_bytes, size))]
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)
