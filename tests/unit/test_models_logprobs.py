"""Log-probabilities beside torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.models.logprobs import Distribution


@pytest.mark.parametrize("top", [0, 1, 5, 20, 300])
def test_they_are_those_of_torch(top: int) -> None:
    logits = np.random.default_rng(1).normal(0, 5, 300).astype(np.float32)
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    known = Distribution(logits, top).of(7)
    assert known.logprob == pytest.approx(float(wanted[7]), abs=1e-5)
    values, ids = torch.topk(wanted, top)
    assert [token for token, _ in known.top] == ids.tolist()
    np.testing.assert_allclose([logprob for _, logprob in known.top], values.numpy(), atol=1e-5)


def test_of_equal_ones_the_smaller_token_comes_first() -> None:
    logits = np.array([1, 3, 3, 3, 0], np.float32)
    assert [token for token, _ in Distribution(logits, 2).of(0).top] == [1, 2]


def test_what_happens_to_the_logits_later_does_not_matter() -> None:
    logits = np.array([1, 3, 2], np.float32)
    known = Distribution(logits, 1)
    before = known.of(1)
    logits[:] = 0
    assert known.of(1) == before
