"""A whole mesh in processes, as a user starts it."""

from __future__ import annotations

import pytest

from tests import random_models


@pytest.fixture(scope="session")
def served_directory(tmp_path_factory):
    """A tiny Llama that a router can serve."""
    return random_models.save_served(tmp_path_factory.mktemp("served") / "tiny")
