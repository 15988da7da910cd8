"""Attention in place on the paged cache, on every instruction set, beside a plain reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from shared.layout import KvLayout
from shared.models import _kernels

ISAS = _kernels.instruction_sets()


class Case(NamedTuple):
    kv_heads: int
    group: int
    dim: int
    page_size: int
    dtype: str


CASES = [
    Case(3, 3, 64, 64, "bfloat16"),
    Case(3, 3, 64, 16, "float32"),
    Case(1, 1, 16, 1, "float32"),
    Case(2, 1, 40, 5, "bfloat16"),
    Case(1, 7, 6, 100, "float32"),
    Case(2, 2, 128, 32, "bfloat16"),
]
LENGTH = 150
LAYERS = 2


class Rig:
    """One sequence of LENGTH tokens in shuffled pages of layer 1; everything else in the cache is NaN."""

    def __init__(self, case: Case, isa: str, threads: int = 2, seed: int = 0) -> None:
        self.case, self.context = case, _kernels.Context(threads, isa)
        layout = KvLayout(
            num_layers=LAYERS,
            num_kv_heads=case.kv_heads,
            head_dim=case.dim,
            page_size=case.page_size,
            dtype=case.dtype,
        )
        rng = np.random.default_rng(seed)
        used = layout.pages_for(LENGTH)
        self.pages = used + 3
        self.table = np.random.default_rng(used).permutation(self.pages)[:used].astype(np.int32)
        self.memory = np.full(layout.region_bytes(self.pages), 0xFF, np.uint8)  # NaN in both dtypes
        self.cache = _kernels.Cache(
            self.memory, LAYERS, self.pages, case.kv_heads, case.page_size, case.dim, case.dtype
        )
        self.heads = case.kv_heads * case.group
        self.qkv = rng.standard_normal((LENGTH, (self.heads + 2 * case.kv_heads) * case.dim)).astype(np.float32)
        angles = rng.uniform(0, 6, (LENGTH, case.dim // 2))
        self.rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.rotary = _kernels.Rotary(self.rope, None, None, 1e-6)

    def batch(self, *rows: tuple[int, int]) -> _kernels.Batch:
        """Rows (start, count) of the one sequence."""
        begins = [i * self.table.size for i in range(len(rows))]
        tables = np.concatenate([self.table] * len(rows))
        return _kernels.Batch(self.cache, [n for _, n in rows], [s for s, _ in rows], tables, begins)

    def append(self, start: int, count: int) -> np.ndarray:
        """The rotated qkv of those tokens, after their K and V were written."""
        qkv = self.qkv[start : start + count].copy()
        self.cache.append(self.context, self.batch((start, count)), 1, self.heads, self.rotary, qkv)
        return qkv

    def attend(self, qkv: np.ndarray, *rows: tuple[int, int]) -> np.ndarray:
        out = np.full((qkv.shape[0], self.heads * self.case.dim), np.nan, np.float32)
        self.cache.attend(self.context, self.batch(*rows), 1, self.heads, self.case.dim**-0.5, qkv, out)
        return out

    def reference(self) -> np.ndarray:
        """Attention of all tokens, float64, from the raw projections."""
        case = self.case
        parts = self.qkv.astype(np.float64).reshape(LENGTH, -1, case.dim)
        q, k, v = np.split(parts, [self.heads, self.heads + case.kv_heads], 1)
        q, k = self.rotated(q), self.stored(self.rotated(k))
        v = self.stored(v)
        out = np.empty((LENGTH, self.heads, case.dim))
        mask = np.tril(np.ones((LENGTH, LENGTH), bool))
        for head in range(self.heads):
            scores = np.where(mask, q[:, head] @ k[:, head // case.group].T * case.dim**-0.5, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, head // case.group]
        return out.reshape(LENGTH, -1)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        cos, sin = np.split(self.rope.astype(np.float64)[:, None, :], 2, 2)
        a, b = np.split(x, 2, 2)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], 2)

    def stored(self, x: np.ndarray) -> np.ndarray:
        if self.case.dtype == "float32":
            return x
        bits = x.astype(np.float32).view(np.uint32)
        return (
            (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, isa):
    rig = Rig(case, isa)
    out = rig.attend(rig.append(0, LENGTH), (0, LENGTH))
    tolerance = 2e-5 if case.dtype == "float32" else 2e-2  # a rotated key may round the other way
    np.testing.assert_allclose(out, rig.reference(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_batches_pages_and_threads_change_no_bit(case, isa):
    whole = Rig(case, isa)
    expected = whole.attend(whole.append(0, LENGTH), (0, LENGTH))
    for page_size, threads, cuts in [
        (case.page_size, 1, [1, 64, 65, 100]),
        (11, 3, range(1, LENGTH)),
        (64, 2, [63, 128]),
    ]:
        rig = Rig(case._replace(page_size=page_size), isa, threads)
        rows = list(zip([0, *cuts], [*cuts, LENGTH], strict=True))
        chunks = [(start, end - start) for start, end in rows]
        qkv = np.concatenate([rig.append(*chunk) for chunk in chunks])
        alone = np.concatenate([rig.attend(qkv[s : s + n], (s, n)) for s, n in chunks])
        assert np.array_equal(alone, expected)
        assert np.array_equal(rig.attend(qkv, *chunks), expected)


def test_head_norms_come_before_the_rotation():
    case = Case(2, 2, 16, 8, "float32")
    rig = Rig(case, ISAS[0])
    q_norm, k_norm = np.linspace(0.5, 2, 16, dtype=np.float32), np.linspace(2, 0.5, 16, dtype=np.float32)
    rig.rotary = _kernels.Rotary(rig.rope, q_norm, k_norm, 1e-6)
    got = rig.append(0, LENGTH).reshape(LENGTH, -1, 16)
    raw = rig.qkv.astype(np.float64).reshape(LENGTH, -1, 16)
    normed = raw / np.sqrt((raw**2).mean(2, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got[:, :4], rig.rotated(normed[:, :4] * q_norm), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[:, 4:6], rig.rotated(normed[:, 4:6] * k_norm), rtol=0, atol=1e-5)
    assert np.array_equal(got[:, 6:], rig.qkv.reshape(LENGTH, -1, 16)[:, 6:])


def test_only_the_rows_own_slots_are_written():
    case = Case(2, 1, 16, 8, "float32")
    rig = Rig(case, ISAS[0])
    rig.append(10, 3)
    pages = rig.memory.view(np.float32).reshape(LAYERS, rig.pages, 2, 2, 8, 16)
    written = ~np.isnan(pages)
    assert written[0].sum() == 0
    expected = np.zeros_like(written[1])
    for position in (10, 11, 12):
        expected[rig.table[position // 8], :, :, position % 8] = True
    assert np.array_equal(written[1], expected)


BAD_ROWS = [
    ([0], [0], [0, 1], [0], "row 0: no tokens"),
    ([1], [-1], [0, 1], [0], "row 0: position -1"),
    ([1, 9], [0, 8], [0, 0, 1], [0, 1], "row 1: needs 3 pages, has 2"),
    ([1], [0], [4], [0], "row 0: page 4 of 4"),
    ([1], [0], [-1], [0], "row 0: page -1 of 4"),
    ([1, 1], [0, 0], [0, 1], [0, 3], "outside"),
    ([1], [0, 0], [0], [0], "differ in length"),
]


@pytest.mark.parametrize(("counts", "starts", "tables", "begins", "text"), BAD_ROWS)
def test_bad_rows_are_refused(counts, starts, tables, begins, text):
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, page_size=8, dtype="float32")
    cache = _kernels.Cache(np.zeros(layout.region_bytes(4), np.uint8), 1, 4, 1, 8, 2, "float32")
    with pytest.raises(ValueError, match=text):
        _kernels.Batch(cache, counts, starts, np.array(tables, np.int32), begins)


def test_a_cache_larger_than_its_memory_is_refused():
    with pytest.raises(ValueError, match="too small"):
        _kernels.Cache(np.zeros(100, np.uint8), 1, 4, 1, 8, 2, "float32")
