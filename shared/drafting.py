"""Who proposes tokens on an instance: found and checked before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from shared.config import SPECULATE_TAKES, Proposer
from shared.engine.protocol import Drafter
from shared.errors import ConfigError, ModelError
from shared.models.config import ModelConfig, load_config
from shared.models.digest import model_digest
from shared.models.shard import Shard
from shared.models.source import resolve

_FLOAT_BYTES = 4


class Drafting(NamedTuple):
    """`kind`, `directory`: as the executor is told (`Start`). `name`: as is announced. `config`: of a draft model."""

    kind: Drafter = "none"
    name: str = ""
    directory: str = ""
    config: ModelConfig | None = None
    hidden_bytes: int = 0


def find_drafter(proposer: Proposer, path: Path, config: ModelConfig, tp: int) -> Drafting:
    """Of the model `config` in `path`, split over `tp` ranks. Blocks, as `resolve`. Raises `ConfigError` for a model without
    a multi-token prediction layer and for a draft that does not fit to it, `ModelError` for one that cannot be read."""
    if proposer.kind == "mtp":
        if not config.mtp_layers:
            missing = "the model has no such layer: num_nextn_predict_layers is not in its config.json, or 0"
            raise ConfigError("KVMESH_SPECULATE", "mtp", f"another value: {missing}")
        return Drafting("mtp", "mtp", hidden_bytes=config.hidden * _FLOAT_BYTES)
    if proposer.kind == "draft":
        return _find_model(proposer.model, path, config, tp)
    return Drafting()


def _find_model(model: str, path: Path, config: ModelConfig, tp: int) -> Drafting:
    directory = resolve(model)
    draft = load_config(directory)
    if (why := _misfit(path, config, directory, draft, tp)) is not None:
        raise ConfigError("KVMESH_SPECULATE", f"draft:{model}", f"{SPECULATE_TAKES}; this one does not fit: {why}")
    return Drafting("model", f"draft {model_digest(directory)}", str(directory), draft)


def _misfit(path: Path, config: ModelConfig, directory: Path, draft: ModelConfig, tp: int) -> str | None:
    if draft.vocab_size != config.vocab_size:
        return f"its vocabulary has {draft.vocab_size} tokens, the model's {config.vocab_size}"
    if _tokens(path) != _tokens(directory):
        return "its tokenizer.json has other tokens than the model's"
    if draft.max_positions < config.max_positions:
        return f"it has {draft.max_positions} positions, the model {config.max_positions}"
    try:
        Shard(ranks=tp).config(draft)
    except ModelError as error:
        return str(error)
    return None


def _tokens(directory: Path) -> Any:
    """What decides which text a token id stands for; None where there is no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text())
        added = sorted((token["id"], token["content"]) for token in fields.get("added_tokens", []))
        return fields["model"]["vocab"], added
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from None
