"""Biases and penalties on logits, beside `transformers` where it has the rule, and beside the rule written out where not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from shared.engine.ints import pack_ints
from shared.engine.protocol import Row
from shared.messages import Sampling
from shared.models.adjust import NEVER, OUTSIDE, adjust, keep_masked

VOCAB = 50
PROMPT, OUTPUT = [3, 3, 7, 9], [7, 11, 11, 11]


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def adjusted(before: np.ndarray, forbidden: list[int] | None = None, mask: bytes = b"", **fields: object) -> np.ndarray:
    sampling = Sampling(temperature=1.0, **fields)
    row = Row(
        tokens=[0],
        start=0,
        pages=b"",
        sample=sampling,
        history=pack_ints(PROMPT + OUTPUT),
        prompt_tokens=len(PROMPT),
        forbidden=forbidden or [],
        mask=mask,
    )
    after = before.copy()
    adjust(after, row)
    return after


def test_nothing_asked_nothing_changed() -> None:
    assert np.array_equal(adjusted(logits()), logits())


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    wanted = reference(torch.tensor([PROMPT + OUTPUT]), torch.from_numpy(logits())[None].clone())[0].numpy()
    np.testing.assert_allclose(adjusted(logits(), repetition_penalty=penalty), wanted, rtol=1e-6)


def test_frequency_and_presence_count_the_output_alone() -> None:
    after = adjusted(logits(), frequency_penalty=0.5, presence_penalty=0.25)
    wanted = logits()
    for token in set(OUTPUT):
        wanted[token] -= 0.5 * OUTPUT.count(token) + 0.25
    np.testing.assert_allclose(after, wanted, rtol=1e-6)
    assert after[3] == logits()[3]


def test_biases_come_before_penalties() -> None:
    after = adjusted(logits(), logit_bias={11: 5.0, 20: -100.0}, repetition_penalty=2.0)
    biased = logits()[11] + np.float32(5.0)
    assert after[11] == pytest.approx(biased / 2 if biased > 0 else biased * 2)
    assert after[20] == pytest.approx(logits()[20] - 100.0)


def test_what_is_forbidden_cannot_come() -> None:
    after = adjusted(logits(), forbidden=[4, 5], logit_bias={4: 100.0})
    assert after[4] == after[5] == NEVER


@pytest.mark.parametrize("fields", [{"logit_bias": {VOCAB: 1.0}}, {"logit_bias": {-1: 1.0}}, {"forbidden": [VOCAB]}])
def test_a_token_that_is_none_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"outside of 0 .. {VOCAB - 1}"):
        adjusted(logits(), **fields)  # type: ignore[arg-type]


def mask_of(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(-(-VOCAB // 32) * 4, "little")


def test_only_what_the_mask_has_can_be_drawn() -> None:
    after = adjusted(logits(), mask=mask_of(0, 31, 32, 49))
    assert np.flatnonzero(after > NEVER).tolist() == [0, 31, 32, 49]
    assert np.array_equal(after[[0, 31, 32, 49]], logits()[[0, 31, 32, 49]])


def test_the_mask_wins_over_biases_and_over_what_is_forbidden() -> None:
    after = adjusted(logits(), forbidden=[4], mask=mask_of(4), logit_bias={4: -100.0, 5: 100.0})
    assert after.argmax() == 4
    assert (np.delete(after, 4) == OUTSIDE).all()


def test_each_position_has_its_mask() -> None:
    masks = mask_of(1) + mask_of(2)
    for position, token in enumerate((1, 2)):
        after = logits()
        keep_masked(after, masks, position)
        assert np.flatnonzero(after > NEVER).tolist() == [token]


@pytest.mark.parametrize(("mask", "position"), [(b"\0" * 7, 0), (b"\0" * 9, 0), (b"\0" * 8, 1)])
def test_a_mask_of_another_vocabulary_is_refused(mask: bytes, position: int) -> None:
    with pytest.raises(ValueError, match="mask"):
        keep_masked(logits(), mask, position)
