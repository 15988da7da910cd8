"""A drafter that cannot be is refused before anything is loaded, in words that say what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.config import DecodeSettings, Proposer, proposer
from shared.drafting import find_drafter
from shared.errors import ConfigError, ModelError
from shared.models.config import load_config
from tests import random_models


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save_served(tmp_path_factory.mktemp("served"))


def find(path: Path, said: str, tp: int = 1) -> object:
    return find_drafter(proposer(DecodeSettings(speculate=said)), path, load_config(path), tp)


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("off", Proposer("off")),
        ("ngram", Proposer("ngram")),
        ("mtp", Proposer("mtp")),
        ("draft:owner/name", Proposer("draft", "owner/name")),
        ("draft:C:/x", Proposer("draft", "C:/x")),
    ],
)
def test_what_it_takes(said: str, means: Proposer) -> None:
    assert proposer(DecodeSettings(speculate=said)) == means


@pytest.mark.parametrize("said", ["", "on", "draft", "draft:", "mtp:x", "ngram:3", "NGRAM"])
def test_what_it_does_not_take_is_named(said: str) -> None:
    with pytest.raises(
        ConfigError, match=f"KVMESH_SPECULATE='{said}': takes off, ngram .*, mtp .* or draft:<directory or"
    ):
        proposer(DecodeSettings(speculate=said))


def test_a_draft_that_fits(served: Path, tmp_path: Path) -> None:
    draft = random_models.save_served(tmp_path / "draft", kind="qwen3", seed=1, num_hidden_layers=1)
    found = find(served, f"draft:{draft}", tp=2)
    assert (found.kind, found.directory, found.config.layers) == ("model", str(draft), 1)
    assert found.name.startswith("draft ")
    other = random_models.save_served(tmp_path / "other", kind="qwen3", seed=2, num_hidden_layers=1)
    assert find(served, f"draft:{other}").name != found.name
    assert find(served, "ngram") == find(served, "off")


def test_a_draft_that_does_not_fit(served: Path, tmp_path: Path) -> None:
    def refused(directory: Path, why: str, tp: int = 1) -> None:
        with pytest.raises(
            ConfigError, match=f"KVMESH_SPECULATE='draft:{directory}': takes .*; this one does not fit: {why}"
        ):
            find(served, f"draft:{directory}", tp)

    refused(random_models.save("llama", tmp_path / "small"), "its vocabulary has 160 tokens, the model's")
    draft = random_models.save_served(tmp_path / "draft", max_position_embeddings=64)
    refused(draft, "it has 64 positions, the model 512")
    heads = random_models.save_served(tmp_path / "heads", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    refused(heads, "tensor parallel 2: takes a divisor of the model's attention heads, 3", tp=2)
    words = random_models.save_served(tmp_path / "words")
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (a, i), (b, j) = list(vocabulary.items())[:2]
    vocabulary.update({a: j, b: i})
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(words, "its tokenizer.json has other tokens than the model's")
    (words / "tokenizer.json").unlink()
    refused(words, "its tokenizer.json has other tokens than the model's")
    with pytest.raises(ModelError, match="takes a directory, a hub id"):
        find(served, "draft:nowhere")


def test_mtp_where_there_is_such_a_layer(served: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"KVMESH_SPECULATE='mtp': takes another value: .*num_nextn_predict_layers"):
        find(served, "mtp")
    found = find(random_models.save_mtp(tmp_path), "mtp")
    assert (found.kind, found.name, found.hidden_bytes) == ("mtp", "mtp", 4 * random_models.SMALL["hidden_size"])
