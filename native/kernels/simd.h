// Vectors of W floats for the instruction set that this translation unit is compiled for.
//
// Everything here is `static`: the same names mean different code in different translation units, and nothing of the
// standard library's inline code may be compiled with flags that the machine may lack. Contraction of a*b+c is off for
// the whole library; `fma` is the only fused operation, so that a result depends on no choice of the compiler.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kvmesh::KVMESH_ISA {

#if defined(__AVX512F__)

using vf = __m512;
using vi = __m512i;
constexpr int W = 16;

static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline vf load(const uint16_t* p) {
    __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
static inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf splat(float x) { return _mm512_set1_ps(x); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
// v where x > limit, else 0.
static inline vf where_above(vf v, vf x, vf limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), v);
}
// The halves of 32 bits as bfloat16.
static inline vf low_bf16(vf v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16)); }
static inline vf high_bf16(vf v) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// 2^n for the integer n that sits in the low mantissa bits of t = n + 1.5 * 2^23.
static inline vf exp2_of_magic(vf t) {
    vi n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000)));
}

#elif defined(__AVX2__)

using vf = __m256;
using vi = __m256i;
constexpr int W = 8;

static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline vf load(const uint16_t* p) {
    __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
static inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf splat(float x) { return _mm256_set1_ps(x); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf where_above(vf v, vf x, vf limit) { return _mm256_and_ps(v, _mm256_cmp_ps(x, limit, _CMP_GT_OQ)); }
static inline vf low_bf16(vf v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16)); }
static inline vf high_bf16(vf v) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
static inline vf exp2_of_magic(vf t) {
    vi n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)));
}

#else  // four floats with the compiler's own vectors: any processor

typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));
typedef uint16_t half4 __attribute__((vector_size(8)));
constexpr int W = 4;

static inline vf load(const float* p) {
    vf v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
static inline vf load(const uint16_t* p) {
    half4 raw;
    __builtin_memcpy(&raw, p, sizeof raw);
    return reinterpret_cast<vf>(__builtin_convertvector(raw, vi) << 16);
}
static inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
static inline vf splat(float x) { return vf{x, x, x, x}; }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf where_above(vf v, vf x, vf limit) { return x > limit ? v : vf{}; }
static inline vf low_bf16(vf v) { return reinterpret_cast<vf>(reinterpret_cast<vi>(v) << 16); }
static inline vf high_bf16(vf v) { return reinterpret_cast<vf>(reinterpret_cast<vi>(v) & 0xffff0000u); }
static inline vf exp2_of_magic(vf t) {
    vi n = reinterpret_cast<vi>(t) << 23;
    return reinterpret_cast<vf>(n + 0x3f800000u);
}

#endif

static inline float first(vf v) { return v[0]; }
static inline vf zero() { return splat(0.0f); }

// Sum and maximum of the lanes: halves are folded onto each other.
#if defined(__AVX2__) || defined(__AVX512F__)
static inline __m128 folded(__m256 v, __m128 (*f)(__m128, __m128)) {
    __m128 half = f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = f(half, _mm_movehl_ps(half, half));
    return f(half, _mm_shuffle_ps(half, half, 1));
}
static inline __m128 add4(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
static inline __m128 max4(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
#endif
#if defined(__AVX512F__)
static inline __m256 upper(vf v) { return _mm512_extractf32x8_ps(v, 1); }
static inline float sum(vf v) {
    return _mm_cvtss_f32(folded(_mm256_add_ps(_mm512_castps512_ps256(v), upper(v)), add4));
}
static inline float peak(vf v) {
    return _mm_cvtss_f32(folded(_mm256_max_ps(_mm512_castps512_ps256(v), upper(v)), max4));
}
#elif defined(__AVX2__)
static inline float sum(vf v) { return _mm_cvtss_f32(folded(v, add4)); }
static inline float peak(vf v) { return _mm_cvtss_f32(folded(v, max4)); }
#else
static inline float sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float peak(vf v) {
    float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
#endif

// e^x for x <= 88, relative error under 2e-7; infinity above 88.4, exactly 0 below -87, so that a masked score weighs
// nothing. Range reduction by ln 2 in two parts, then the degree-6 Taylor-like minimax polynomial of Cephes' expf.
static inline vf vexp(vf given) {
    const vf magic = splat(12582912.0f);
    vf x = vmin(vmax(given, splat(-87.0f)), splat(88.9f));
    vf t = fma(x, splat(1.44269504f), magic);
    vf n = t - magic;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    vf rr = r * r;
    p = fma(p, rr, r + splat(1.0f));
    return where_above(p * exp2_of_magic(t), given, splat(-87.0f));
}

}  // namespace kvmesh::KVMESH_ISA
