"""A whole mesh in processes, as a user starts it."""

from __future__ import annotations

import pytest

from tests import random_models


@pytest.fixture(scope="session")
def served_directory(tmp_path_factory):
    """A tiny Llama that a router can serve."""
    return random_models.save_served(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def expected(served_directory):
    """What the model says to each prompt, run whole in one process."""
    from tokenizers import Tokenizer

    from shared.engine.whole import Whole, WholeConfig

    whole = Whole(served_directory, WholeConfig(page_size=16, kv_tokens=2048))
    tokenizer = Tokenizer.from_file(str(served_directory / "tokenizer.json"))

    def say(tokens: list[int], max_tokens: int = 8) -> str:
        return tokenizer.decode(whole.generate([tokens], max_tokens)[0], skip_special_tokens=True)

    return say
