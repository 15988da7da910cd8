"""Packed linears on every instruction set: right, and each row the same whatever runs beside it."""

from __future__ import annotations

import numpy as np
import pytest

from shared.models import _kernels

ISAS = _kernels.instruction_sets()
ROWS = [1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 28, 29, 113]
SHAPES = [(32, 16), (33, 7), (96, 100), (7, 1), (160, 200)]


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits_of(values: np.ndarray) -> np.ndarray:
    """bfloat16 by truncation, as raw bits."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def floats_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def run(linear: _kernels.Linear, context: _kernels.Context, x: np.ndarray) -> np.ndarray:
    out = np.full((x.shape[0], linear.results), np.nan, np.float32)
    linear.run(context, x, out)
    return out


@pytest.fixture(params=ISAS)
def context(request):
    return _kernels.Context(2, request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_product_equals_numpy(context, outputs, inputs, dtype):
    bits = bits_of(numbers(1, outputs, inputs))
    weights = floats_of(bits)
    linear = _kernels.Linear(context, outputs, inputs, dtype)
    linear.fill_half(0, bits, "bfloat16")
    for rows in ROWS:
        x = numbers(rows, rows, inputs)
        expected = x.astype(np.float64) @ weights.astype(np.float64).T
        np.testing.assert_allclose(run(linear, context, x), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_mates_or_the_threads(context, dtype):
    linear = _kernels.Linear(context, 200, 77, dtype)
    linear.fill(0, numbers(2, 200, 77))
    x = numbers(3, max(ROWS), 77)
    alone = np.concatenate([run(linear, context, x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 3):
        other = _kernels.Context(threads, context.isa)
        for rows in ROWS:
            assert np.array_equal(run(linear, other, x[:rows]), alone[:rows])


def test_fused_instruction_sets_agree_to_the_bit():
    results = []
    for isa in set(ISAS) - {"generic"}:
        context = _kernels.Context(1, isa)
        linear = _kernels.Linear(context, 64, 300, "bfloat16")
        linear.fill(0, numbers(4, 64, 300))
        results.append(run(linear, context, numbers(5, 20, 300)))
    assert all(np.array_equal(result, results[0]) for result in results)


def test_bias_and_add(context):
    weights, bias = numbers(6, 40, 24), numbers(7, 40)
    linear = _kernels.Linear(context, 40, 24, "float32")
    linear.fill(0, weights)
    linear.fill_bias(0, bias)
    for rows in (1, 30):
        x, out = numbers(8, rows, 24), numbers(9, rows, 40)
        expected = out + x @ weights.T + bias
        linear.run(context, x, out, add=True)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [16, 17, 48, 5])
def test_gated_is_silu_of_the_first_half_times_the_second(context, half):
    gate, up = numbers(10, half, 24), numbers(11, half, 24)
    gate_bias, up_bias = numbers(12, half), numbers(13, half)
    linear = _kernels.Linear(context, 2 * half, 24, "float32", gated=True)
    linear.fill(0, gate)
    linear.fill(half, up)
    linear.fill_bias(0, gate_bias)
    linear.fill_bias(half, up_bias)
    for rows in (1, 5, 40):
        x = numbers(14, rows, 24)
        g = (x @ gate.T + gate_bias).astype(np.float64)
        expected = g / (1 + np.exp(-g)) * (x @ up.T + up_bias)
        np.testing.assert_allclose(run(linear, context, x), expected, rtol=2e-5, atol=2e-5)


def test_gated_survives_extreme_gates(context):
    linear = _kernels.Linear(context, 2, 1, "float32", gated=True)
    linear.fill(0, np.ones((2, 1), np.float32))
    x = np.array([[-1e30], [-200.0], [0.0], [200.0]], np.float32)
    np.testing.assert_allclose(run(linear, context, x)[:, 0], [0, 0, 0, 40000], atol=1e-30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_filled_piecewise_and_embedded(context, dtype):
    bits = bits_of(numbers(15, 70, 33))
    linear = _kernels.Linear(context, 70, 33, dtype)
    for first in range(0, 70, 20):
        linear.fill_half(first, bits[first : first + 20], "bfloat16")
    tokens = np.array([0, 69, 31, 32, 31], np.int32)
    out = np.empty((5, 33), np.float32)
    linear.embed(context, tokens, out)
    assert np.array_equal(out, floats_of(bits)[tokens])


def test_float16_and_rounding_to_bfloat16():
    context = _kernels.Context(1)
    values = np.array([[0.0, -0.0, 1.0, 65504.0, 2.0**-24, -(2.0**-14), 0.333251953125, np.inf]], np.float16)
    exact = _kernels.Linear(context, 1, 8, "float32")
    exact.fill_half(0, values.view(np.uint16), "float16")
    rounded = _kernels.Linear(context, 1, 8, "bfloat16")
    ties = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, 1, 2, np.nan]], np.float32)
    rounded.fill(0, ties)
    out = np.empty((1, 8), np.float32)
    exact.embed(context, np.zeros(1, np.int32), out)
    assert np.array_equal(out, values.astype(np.float32))
    rounded.embed(context, np.zeros(1, np.int32), out)
    expected = np.array([[1, 1 + 2**-6, 1 + 2**-7, -1, out[0, 4], 1, 2, np.nan]], np.float32)
    assert np.array_equal(out, expected, equal_nan=True)
    assert abs(out[0, 4] / 3e38 - 1) < 2**-8


def test_shapes_are_checked():
    context = _kernels.Context(1)
    linear = _kernels.Linear(context, 4, 3, "float32")
    with pytest.raises(ValueError, match="inputs"):
        linear.fill(0, numbers(0, 2, 5))
    with pytest.raises(ValueError, match="outside"):
        linear.fill(3, numbers(0, 2, 3))
    with pytest.raises(ValueError, match="rows, inputs"):
        linear.run(context, numbers(0, 2, 3), np.empty((3, 4), np.float32))
    with pytest.raises(ValueError, match="vocabulary"):
        linear.embed(context, np.array([4], np.int32), np.empty((1, 3), np.float32))
    with pytest.raises(ValueError, match="dtype"):
        _kernels.Linear(context, 4, 3, "int8")
    with pytest.raises(ValueError, match="even"):
        _kernels.Linear(context, 3, 3, "float32", gated=True)


def test_instruction_set_is_chosen_or_forced():
    assert ISAS[-1] == "generic"
    assert _kernels.Context(1).isa == ISAS[0]
    with pytest.raises(ValueError, match="takes auto"):
        _kernels.Context(1, "mmx")
    with pytest.raises(ValueError, match="threads"):
        _kernels.Context(0)


@pytest.mark.parametrize("n", [1, 15, 16, 64, 100])
def test_rms_norm(context, n):
    x, weight = numbers(16, 40, n), numbers(17, n)
    out = np.empty_like(x)
    _kernels.rms_norm(context, x, weight, 1e-5, out)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
