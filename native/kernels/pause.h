// A hint to the processor that this thread spins.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvmesh {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace kvmesh
