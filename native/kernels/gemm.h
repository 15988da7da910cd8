// Multiplication of a block of rows by one packed panel, for the instruction set of this translation unit.
//
// Every element of a result is one chain of fused multiply-adds over k = 0, 1, 2, ...: it depends on the row and on the
// weights, not on how many rows run beside it. Prefill chunks, batches and single tokens therefore give equal bits.
#pragma once

#include "isa.h"
#include "simd.h"

namespace kvmesh::KVMESH_ISA {

// Register blocking: ROWS x VECS accumulators, VECS vectors of a panel's row, one broadcast.
#if defined(__AVX512F__)
constexpr int kRows = 14;
#elif defined(__AVX2__)
constexpr int kRows = 6;
#else
constexpr int kRows = 4;
#endif
constexpr int kVecs = 2;
constexpr int kStrip = kVecs * W;

// a[i * ROW_STRIDE + p * K_STRIDE] is row i's p-th value. `c` is [R][ldc]. ADD: c += a b, else c = a b.
template <int R, int VECS, int ROW_STRIDE, int K_STRIDE, bool ADD, class B>
static inline void strip(int k, const float* a, const B* b, int64_t ldb, float* c, int64_t ldc) {
    vf acc[R][VECS];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[i][v] = ADD ? load(c + i * ldc + v * W) : zero();
    for (int p = 0; p < k; ++p) {
        vf row[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) row[v] = load(b + v * W);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            vf x = splat(a[i * ROW_STRIDE]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[i][v] = fma(x, row[v], acc[i][v]);
        }
        a += K_STRIDE;
        b += ldb;
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store(c + i * ldc + v * W, acc[i][v]);
}

// The same over `n` columns, a multiple of 32. Few rows take more columns at once: otherwise each addition would wait
// for the one before.
template <int R, int ROW_STRIDE, int K_STRIDE, bool ADD, class B>
static inline void strips(int n, int k, const float* a, const B* b, int64_t ldb, float* c, int64_t ldc) {
    int j = 0;
    if constexpr (R <= 3)
        for (; j + 4 * W <= n; j += 4 * W) strip<R, 4, ROW_STRIDE, K_STRIDE, ADD>(k, a, b + j, ldb, c + j, ldc);
    for (; j < n; j += kStrip) strip<R, kVecs, ROW_STRIDE, K_STRIDE, ADD>(k, a, b + j, ldb, c + j, ldc);
}

template <int R, class B>
static void panel_from(int rows, int k, const float* a, const void* b, float* tile) {
    if (rows == R)
        strips<R, 1, R, false>(kPanel, k, a, static_cast<const B*>(b), kPanel, tile, kPanel);
    else if constexpr (R > 1)
        panel_from<R - 1, B>(rows, k, a, b, tile);
}

template <class B>
static void panel(int rows, int k, const float* a, const void* b, float* tile) {
    panel_from<kRows, B>(rows, k, a, b, tile);
}

static void widen(int64_t count, const uint16_t* in, float* out) {
    for (int64_t i = 0; i < count; i += W) store(out + i, load(in + i));
}

static void pack(int rows, int k, const float* x, int64_t ldx, float* a) {
    for (int i = 0; i < rows; ++i)
        for (int p = 0; p < k; ++p) a[int64_t{p} * rows + i] = x[i * ldx + p];
}

}  // namespace kvmesh::KVMESH_ISA
