// W rows of n values, wherever each lies, to columns: out[p * ldo + i] = rows[i][p].
#pragma once

#include "simd.h"

namespace kvmesh::KVMESH_ISA {

static inline float to_float(float x) { return x; }
static inline float to_float(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

#if defined(__AVX512F__)

static inline void transpose_square(vf r[16]) {
    vf t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#elif defined(__AVX2__)

static inline void transpose_square(vf r[8]) {
    vf t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = t[i];
}

#else

static inline void transpose_square(vf r[4]) {
    float t[4][4];
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) t[j][i] = r[i][j];
    for (int i = 0; i < 4; ++i) r[i] = load(t[i]);
}

#endif

static inline void transpose_rest(int p, int n, const float* const* rows, float* out, int64_t ldo) {
    for (; p < n; ++p)
        for (int i = 0; i < W; ++i) out[p * ldo + i] = rows[i][p];
}

static inline void transpose_rest(int p, int n, const uint16_t* const* rows, float* out, int64_t ldo) {
    for (; p < n; ++p)
        for (int i = 0; i < W; ++i) out[p * ldo + i] = to_float(rows[i][p]);
}

static inline void transpose_rows(int n, const float* const* rows, float* out, int64_t ldo) {
    int p = 0;
    for (; p + W <= n; p += W) {
        vf square[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) square[i] = load(rows[i] + p);
        transpose_square(square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(out + (p + i) * ldo, square[i]);
    }
    transpose_rest(p, n, rows, out, ldo);
}

// Two neighbours travel as one 32-bit value, and part at the end.
static inline void transpose_rows(int n, const uint16_t* const* rows, float* out, int64_t ldo) {
    int p = 0;
    for (; p + 2 * W <= n; p += 2 * W) {
        vf square[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) square[i] = load(reinterpret_cast<const float*>(rows[i] + p));
        transpose_square(square);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) {
            store(out + (p + 2 * i) * ldo, low_bf16(square[i]));
            store(out + (p + 2 * i + 1) * ldo, high_bf16(square[i]));
        }
    }
    transpose_rest(p, n, rows, out, ldo);
}

}  // namespace kvmesh::KVMESH_ISA
