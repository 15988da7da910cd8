// W rows of n values, wherever each lies, to columns: out[p * ldo + i] = rows[i][p]. A null row reads as zeros.
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
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
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
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
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

template <class T>
static void transpose_rows(int n, const T* const* rows, float* out, int64_t ldo) {
    int p = 0;
    for (; p + W <= n; p += W) {
        vf square[W];
        for (int i = 0; i < W; ++i) square[i] = rows[i] ? load(rows[i] + p) : zero();
        transpose_square(square);
        for (int i = 0; i < W; ++i) store(out + (p + i) * ldo, square[i]);
    }
    for (; p < n; ++p)
        for (int i = 0; i < W; ++i) out[p * ldo + i] = rows[i] ? to_float(rows[i][p]) : 0.0f;
}

}  // namespace kvmesh::KVMESH_ISA
