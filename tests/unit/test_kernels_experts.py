"""Routing and experts beside NumPy, and a token's result beside any mates."""

from __future__ import annotations

import numpy as np
import pytest

from shared.models import _kernels

ISAS = _kernels.instruction_sets()
EXPERTS, HIDDEN, BETWEEN, TOKENS = 16, 40, 24, 90


def route(router, logits, per_token, threads=2):
    ids = np.empty((logits.shape[0], per_token), np.int32)
    weights = np.empty((logits.shape[0], per_token), np.float32)
    router.route(_kernels.Context(threads), logits, ids, weights)
    return ids, weights


def logits_for(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, EXPERTS)).astype(np.float32)


def test_softmax_routing():
    logits = logits_for(TOKENS)
    exponents = np.exp(logits.astype(np.float64))
    scores = exponents / exponents.sum(1, keepdims=True)
    order = np.argsort(-scores, 1)[:, :3]
    for normalise in (False, True):
        router = _kernels.Router(sigmoid=False, normalise=normalise, scale=1.0, groups=1, top_groups=1, bias=None)
        ids, weights = route(router, logits, 3)
        assert np.array_equal(ids, order)
        expected = np.take_along_axis(scores, order, 1)
        np.testing.assert_allclose(weights, expected / expected.sum(1, keepdims=True) if normalise else expected, 1e-5)


def test_grouped_sigmoid_routing():
    """The bias moves the choice, not the weights; experts outside of the two best groups are not chosen."""
    logits = logits_for(TOKENS)
    bias = np.random.default_rng(3).normal(0, 1, EXPERTS).astype(np.float32)
    router = _kernels.Router(sigmoid=True, normalise=True, scale=2.5, groups=4, top_groups=2, bias=bias)
    ids, weights = route(router, logits, 4)
    for row, chosen, weight in zip(logits.astype(np.float64), ids, weights, strict=True):
        scores = 1 / (1 + np.exp(-row))
        choice = (scores + bias).reshape(4, 4)
        groups = np.argsort(-np.sort(choice, 1)[:, 2:].sum(1))[:2]
        limited = np.full((4, 4), -np.inf)
        limited[groups] = choice[groups]
        assert list(chosen) == list(np.argsort(-limited.ravel())[:4])
        np.testing.assert_allclose(weight, scores[chosen] / scores[chosen].sum() * 2.5, 1e-5)


def test_equal_scores_go_to_the_smaller_number_and_nan_to_somebody():
    router = _kernels.Router(sigmoid=True, normalise=True, scale=1.0, groups=4, top_groups=1, bias=None)
    logits = np.zeros((2, EXPERTS), np.float32)
    logits[1] = np.nan
    ids, _ = route(router, logits, 3)
    assert ids[0].tolist() == [0, 1, 2]
    assert len(set(ids[1].tolist())) == 3


def normal(rng, *shape):
    """Values that bfloat16 holds."""
    bits = rng.normal(0, 0.3, shape).astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def experts_for(isa, dtype):
    context, rng = _kernels.Context(2, isa), np.random.default_rng(5)
    gate_up, down, matrices = [], [], []
    for _ in range(EXPERTS):
        a = normal(rng, 2 * BETWEEN, HIDDEN)
        b = normal(rng, HIDDEN, BETWEEN)
        gate_up.append(_kernels.Linear(context, 2 * BETWEEN, HIDDEN, dtype, gated=True))
        down.append(_kernels.Linear(context, HIDDEN, BETWEEN, dtype))
        gate_up[-1].fill(0, a)
        down[-1].fill(0, b)
        matrices.append((a.astype(np.float64), b.astype(np.float64)))
    return context, _kernels.Experts(gate_up, down), matrices


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_equal_the_reference_whoever_the_mates_are(isa, dtype):
    context, experts, matrices = experts_for(isa, dtype)
    rng = np.random.default_rng(6)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS - 1)[:3] for _ in range(TOKENS)]).astype(np.int32)  # the last idles
    ids[:, 0][ids[:, 1:].min(1) > 0] = 0  # one with more rows than a block
    weights = rng.uniform(0, 1, ids.shape).astype(np.float32)
    together = np.ones_like(x)
    experts.add(context, ids, weights, x, together)
    expected = np.ones(x.shape)
    for i, token in enumerate(x.astype(np.float64)):
        for e, weight in zip(ids[i], weights[i], strict=True):
            gate, up = np.split(matrices[e][0] @ token, 2)
            expected[i] += weight * (matrices[e][1] @ (gate / (1 + np.exp(-gate)) * up))
    assert abs(together - expected).max() < 1e-5
    for first, end in [(0, 1), (1, 8), (8, TOKENS)]:
        part = np.ones_like(x[first:end])
        experts.add(context, ids[first:end], weights[first:end], x[first:end], part)
        assert np.array_equal(part, together[first:end])


def test_columns_run_where_they_are_told():
    context, rng = _kernels.Context(1), np.random.default_rng(7)
    matrices = rng.standard_normal((3, 5, 4)).astype(np.float32)
    linears = [_kernels.Linear(context, 5, 4, "float32") for _ in matrices]
    for linear, matrix in zip(linears, matrices, strict=True):
        linear.fill(0, matrix)
    x, out = rng.standard_normal((20, 1 + 3 * 6)).astype(np.float32), np.zeros((20, 2 + 3 * 7), np.float32)
    _kernels.Columns(linears, x_first=1, x_step=6, out_first=2, out_step=7).run(context, x, out)
    expected = np.zeros_like(out)
    for i, matrix in enumerate(matrices):
        expected[:, 2 + 7 * i : 7 + 7 * i] = x[:, 1 + 6 * i : 5 + 6 * i] @ matrix.T
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="columns outside"):
        _kernels.Columns(linears, x_first=5, x_step=6, out_first=2, out_step=7).run(context, x, out)


def test_what_does_not_fit_is_refused():
    context = _kernels.Context(1)
    gated = [_kernels.Linear(context, 8, 4, "float32", gated=True)]
    with pytest.raises(ValueError, match="do not fit"):
        _kernels.Experts(gated, [_kernels.Linear(context, 4, 5, "float32")])
    with pytest.raises(ValueError, match="two linears"):
        _kernels.Experts(gated, [])
    experts = _kernels.Experts(gated, [_kernels.Linear(context, 4, 4, "float32")])
    x = np.zeros((1, 4), np.float32)
    with pytest.raises(ValueError, match="no such expert"):
        experts.add(context, np.array([[1]], np.int32), np.ones((1, 1), np.float32), x, x.copy())
    with pytest.raises(ValueError, match="top_groups <= groups"):
        _kernels.Router(sigmoid=True, normalise=True, scale=1.0, groups=2, top_groups=3, bias=None)
    router = _kernels.Router(sigmoid=True, normalise=True, scale=1.0, groups=4, top_groups=1, bias=None)
    with pytest.raises(ValueError, match="fewer experts"):
        route(router, logits_for(1), 5)
