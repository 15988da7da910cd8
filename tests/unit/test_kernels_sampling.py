"""Sampling: the known answers of Philox, which tokens may be drawn, how often, and from what a draw depends."""

from __future__ import annotations

import numpy as np
import pytest

from shared.messages import Sampling
from shared.models import _kernels
from shared.models.sampling import sample

CONTEXT = _kernels.Context(2)


def drawn(logits: np.ndarray, sampling: Sampling, count: int) -> np.ndarray:
    """Draws at positions 0 .. count - 1."""
    rows = np.ascontiguousarray(np.broadcast_to(logits.astype(np.float32), (count, logits.size)))
    return np.array(sample(CONTEXT, rows, [sampling] * count, range(count)))


KNOWN = [  # Random123's kat_vectors, philox4x32 10
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_philox_known_answers(key, counter, expected):
    assert tuple(_kernels.philox(*key, counter)) == expected


def test_uniform_is_uniform_and_in_range():
    draws = np.array([_kernels.philox_uniform(seed, p) for seed in (0, 1, 2**64 - 1) for p in range(4000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert np.unique(draws).size == draws.size
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert abs(counts - 600).max() < 120  # five standard deviations


def test_greedy_takes_the_first_of_the_largest():
    logits = np.array([1.0, 3.0, -np.inf, 3.0])
    assert drawn(logits, Sampling(temperature=0.0), 3).tolist() == [1, 1, 1]
    assert drawn(logits, Sampling(temperature=1e-30), 3).tolist() == [1, 1, 1]


@pytest.mark.parametrize("bad", [[np.nan, 1.0, 2.0], [np.inf, 1.0, 2.0], [-np.inf] * 3, [np.nan] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad, temperature):
    rows = np.array([[1, 2, 3], bad], np.float32)
    samplings = [Sampling(temperature=temperature)] * 2
    if np.isnan(bad[0]) and not np.isnan(bad[1]):
        rows[1] = [1.0, np.nan, np.inf]
    with pytest.raises(ValueError, match="row 1"):
        sample(CONTEXT, rows, samplings, [0, 0])


def allowed(logits: np.ndarray, s: Sampling) -> dict[int, float]:
    """Token → probability, by the definition, in float64."""
    p = np.exp((logits - logits.max()) / s.temperature)
    order = [i for i in np.lexsort((np.arange(p.size), -p)) if p[i] >= s.min_p]
    order = order[: s.top_k] if s.top_k else order
    mass, kept, total = 0.0, [], p[order].sum()
    for i in order:
        if kept and mass >= s.top_p * total:
            break
        kept.append(i)
        mass += p[i]
    return {int(i): p[i] / mass for i in kept}


SETTINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, seed=2),
    Sampling(temperature=2.0, top_k=5, seed=3),
    Sampling(temperature=1.0, top_p=0.8, seed=4),
    Sampling(temperature=1.3, top_p=0.05, seed=5),
    Sampling(temperature=1.5, min_p=0.2, seed=6),
    Sampling(temperature=1.5, min_p=0.02, top_k=12, top_p=0.9, seed=7),
    Sampling(temperature=1.0, top_k=1, seed=8),
    Sampling(temperature=1.0, min_p=1.0, seed=9),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_frequencies_are_the_definitions(setting):
    logits = np.random.default_rng(0).standard_normal(60) * 2
    count = 8000
    got = np.bincount(drawn(logits, setting, count), minlength=60) / count
    expected = np.zeros(60)
    for token, p in allowed(logits, setting).items():
        expected[token] = p
    assert not got[expected == 0].any()
    assert abs(got - expected).max() < 5 * (0.25 / count) ** 0.5


def test_wide_vocabularies_are_ranked_right():
    logits = np.random.default_rng(1).standard_normal(50_000)
    for setting in (Sampling(temperature=1.0, top_p=0.5), Sampling(temperature=1.0, top_k=3000), SETTINGS[6]):
        kept = allowed(logits.astype(np.float32).astype(np.float64), setting)
        assert set(drawn(logits, setting, 200).tolist()) <= set(kept)


def test_ties_go_to_the_smaller_token():
    assert set(drawn(np.zeros(300), Sampling(temperature=1.0, top_k=4), 200).tolist()) == {0, 1, 2, 3}


def test_a_draw_depends_on_seed_and_position_alone():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 100)).astype(np.float32)
    samplings = [Sampling(temperature=1.0, seed=int(s), top_p=p) for s, p in zip(range(6), [1, 0.9] * 3, strict=True)]
    together = sample(CONTEXT, logits, samplings, range(10, 16))
    for i in reversed(range(6)):
        assert sample(CONTEXT, logits[i : i + 1], [samplings[i]], [10 + i]) == [together[i]]
    flat = np.zeros(1000)
    assert len(set(drawn(flat, Sampling(temperature=1.0, seed=5), 50).tolist())) > 40
    assert not np.array_equal(
        drawn(flat, Sampling(temperature=1.0, seed=5), 50), drawn(flat, Sampling(temperature=1.0, seed=6), 50)
    )


def test_seeds_of_any_size_are_taken():
    assert (
        drawn(np.zeros(10), Sampling(temperature=1.0, seed=-1), 3).tolist()
        == drawn(np.zeros(10), Sampling(temperature=1.0, seed=2**64 - 1), 3).tolist()
    )
