// Row-wise operations for the instruction set of this translation unit.
#pragma once

#include "isa.h"
#include "simd.h"

namespace kvmesh::KVMESH_ISA {

static inline float root(float x) { return __builtin_sqrtf(x); }

static void rms_norm(int n, const float* x, const float* weight, float eps, float* out) {
    vf squares = zero();
    int i = 0;
    for (; i + W <= n; i += W) {
        vf v = load(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (int j = i; j < n; ++j) total += x[j] * x[j];
    float factor = 1.0f / root(total / static_cast<float>(n) + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, load(weight + i) * (load(x + i) * splat(factor)));
    for (; i < n; ++i) out[i] = weight[i] * (x[i] * factor);
}

static inline vf silu_mul(vf gate, vf up) { return gate / (splat(1.0f) + vexp(zero() - gate)) * up; }

// x / 2 * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 x^3) is x / (1 + e^(-2 z)).
static inline vf gelu_mul(vf gate, vf up) {
    vf inner = fma(gate * gate * gate, splat(0.044715f), gate);
    return gate / (splat(1.0f) + vexp(inner * splat(-1.5957691216f))) * up;
}

// out[i] = f(gate[i], up[i])
template <class F>
static inline void gated(int n, const float* gate, const float* up, float* out, F f) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, f(load(gate + i), load(up + i)));
    if (i == n) return;
    float g[W] = {}, u[W] = {}, o[W];
    for (int j = i; j < n; ++j) g[j - i] = gate[j], u[j - i] = up[j];
    store(o, f(load(g), load(u)));
    for (int j = i; j < n; ++j) out[j] = o[j - i];
}

static void silu_mul(int n, const float* gate, const float* up, float* out) {
    gated(n, gate, up, out, [](vf g, vf u) { return silu_mul(g, u); });
}

static void gelu_mul(int n, const float* gate, const float* up, float* out) {
    gated(n, gate, up, out, [](vf g, vf u) { return gelu_mul(g, u); });
}

static void softmax_weights(int n, const float* x, float top, float factor, float* out) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, vexp((load(x + i) - splat(top)) * splat(factor)));
    if (i == n) return;
    float rest[W] = {}, weights[W];
    for (int j = i; j < n; ++j) rest[j - i] = x[j];
    store(weights, vexp((load(rest) - splat(top)) * splat(factor)));
    for (int j = i; j < n; ++j) out[j] = weights[j - i];
}

}  // namespace kvmesh::KVMESH_ISA
