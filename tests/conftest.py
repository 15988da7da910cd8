"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker import Broker


@pytest.fixture(scope="session")
def shared_broker() -> Iterator[Broker]:
    """One broker for tests that leave it alone; each uses names of its own."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def nats() -> Iterator[Broker]:
    """A fresh broker, which the test may kill: `url`, `token`, `kill()`, `start()`."""
    with Broker() as broker:
        yield broker
