// One token out of a row of logits.
#pragma once

#include <cstdint>

#include "context.h"

namespace kvmesh {

struct Draw {
    float temperature;  // under 1e-6: the first of the largest logits
    float top_p;        // 1: no limit
    float min_p;        // 0: no limit
    int top_k;          // 0: no limit
    double uniform;     // in [0, 1): the draw itself
};

// Kept are the tokens whose probability is at least min_p times the best one's; of these the top_k likeliest; of these
// the shortest prefix, likeliest first, that has top_p of their probability. Ties go to the smaller token. -1 where no
// logit is a finite maximum. `scratch` is the thread's.
int32_t sample(const Kernels& kernels, int vocab, const float* logits, const Draw& draw, Arena<float>& scratch);

// A number in [0, 1) that depends on its arguments alone: Philox4x32-10 (Salmon et al., 2011), key seed, counter
// position.
double philox_uniform(uint64_t seed, uint64_t position);

// The four words of one block, for known-answer tests.
void philox(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]);

}  // namespace kvmesh
