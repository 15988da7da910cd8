// Conversions between the number formats of checkpoints and caches.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvmesh {

inline float float_of_bf16(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t bf16_of_float(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_of_f16(uint16_t x) {
    uint32_t sign = (x & 0x8000u) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023u;
    if (exponent == 0) {
        float f = static_cast<float>(mantissa) / 16777216.0f;  // 2^-24
        return sign ? -f : f;
    }
    uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

}  // namespace kvmesh
