"""Attention over a latent cache, and through a sliding window, beside NumPy; and the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest

from shared.layout import KvLayout
from shared.models import _kernels
from shared.models.cpu import CpuCache

ISAS = _kernels.instruction_sets()
LENGTH, RANK, ROTATED, DIM = 150, 40, 8, 48


class Rig:
    """One sequence over one layer of shuffled pages; `rank` 0: two KV heads with K and V."""

    def __init__(self, isa: str, *, heads: int, rank: int, page_size: int = 16, threads: int = 2) -> None:
        self.context, self.heads, self.rank = _kernels.Context(threads, isa), heads, rank
        self.kv_heads = 1 if rank else 2
        layout = KvLayout(
            num_layers=1,
            num_kv_heads=self.kv_heads,
            head_dim=DIM,
            page_size=page_size,
            dtype="float32",
            kind="mla" if rank else "gqa",
        )
        pages = layout.pages_for(LENGTH)
        self.table = np.random.default_rng(1).permutation(pages).astype(np.int32)
        memory = np.full(layout.region_bytes(pages), 0xFF, np.uint8)
        self.cache = CpuCache(layout, pages, memory, rank).view
        width = heads + (1 if rank else 2 * self.kv_heads)
        self.qkv = np.random.default_rng(0).standard_normal((LENGTH, width * DIM)).astype(np.float32)
        rotated = ROTATED if rank else DIM
        angles = np.random.default_rng(2).uniform(0, 6, (LENGTH, rotated // 2))
        self.rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.norm = np.linspace(0.5, 2, rank, dtype=np.float32) if rank else None

    def run(self, window: int, *chunks: tuple[int, int]) -> np.ndarray:
        outs = [self._chunk(window, start, count) for start, count in chunks]
        return np.concatenate(outs)

    def _chunk(self, window: int, start: int, count: int) -> np.ndarray:
        batch = _kernels.Batch(self.cache, [count], [start], self.table, [0])
        qkv = self.qkv[start : start + count].copy()
        rotary = _kernels.Rotary(self.rope, None, self.norm, 1e-6)
        self.cache.append(self.context, batch, 0, self.heads, rotary, qkv)
        out = np.full((count, self.heads * (self.rank or DIM)), np.nan, np.float32)
        self.cache.attend(self.context, batch, 0, self.heads, 0.3, qkv, out, window=window)
        return out

    def reference(self, window: int) -> np.ndarray:
        parts = self.qkv.astype(np.float64).reshape(LENGTH, -1, DIM)
        q, k = self.rotated(parts[:, : self.heads]), parts[:, self.heads : self.heads + self.kv_heads]
        if self.norm is not None:
            latent = k[..., : self.rank]
            normed = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6) * self.norm
            k = np.concatenate([normed, k[..., self.rank :]], -1)
        k = self.rotated(k)
        v = k[..., : self.rank] if self.rank else parts[:, self.heads + self.kv_heads :]
        age = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
        seen = (age >= 0) & (age < (window or LENGTH))
        out = np.empty((LENGTH, self.heads, v.shape[-1]))
        for head in range(self.heads):
            of = head // (self.heads // self.kv_heads)
            scores = np.where(seen, q[:, head] @ k[:, of].T * 0.3, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, of]
        return out.reshape(LENGTH, -1)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        width = self.rope.shape[1]
        cos, sin = np.split(self.rope.astype(np.float64)[:, None, :], 2, 2)
        a, b = np.split(x[..., -width:], 2, 2)
        return np.concatenate([x[..., :-width], a * cos - b * sin, b * cos + a * sin], 2)


CASES = [(4, RANK, 0), (33, RANK, 0), (130, RANK, 0), (4, 0, 1), (4, 0, 20), (4, 0, 64), (2, 0, 100), (4, RANK, 70)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "rank", "window"), CASES)
def test_equals_the_reference_however_it_is_cut(isa, heads, rank, window):
    whole = Rig(isa, heads=heads, rank=rank).run(window, (0, LENGTH))
    np.testing.assert_allclose(whole, Rig(isa, heads=heads, rank=rank).reference(window), rtol=0, atol=5e-5)
    for page_size, threads, cuts in [(16, 1, [1, 64, 65, 100]), (11, 3, range(1, LENGTH)), (64, 2, [63, 128])]:
        rig = Rig(isa, heads=heads, rank=rank, page_size=page_size, threads=threads)
        chunks = [(s, e - s) for s, e in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
        assert np.array_equal(rig.run(window, *chunks), whole)


def test_shapes_are_checked():
    rig = Rig(ISAS[0], heads=4, rank=RANK)
    batch = _kernels.Batch(rig.cache, [1], [0], rig.table, [0])
    rotary = _kernels.Rotary(np.zeros((LENGTH, DIM), np.float32), None, None, 1e-6)
    with pytest.raises(ValueError, match="rotary table"):
        rig.cache.append(rig.context, batch, 0, 4, rotary, rig.qkv[:1].copy())
    rotary = _kernels.Rotary(rig.rope, None, np.ones(DIM, np.float32), 1e-6)
    with pytest.raises(ValueError, match="head norm"):
        rig.cache.append(rig.context, batch, 0, 4, rotary, rig.qkv[:1].copy())
    with pytest.raises(ValueError, match="out is"):
        rig.cache.attend(rig.context, batch, 0, 4, 1.0, rig.qkv[:1], np.empty((1, 4 * DIM), np.float32))
    with pytest.raises(ValueError, match="latent is below dim"):
        _kernels.Cache(np.zeros(10000, np.uint8), 1, 1, 1, 1, DIM, "float32", DIM)
