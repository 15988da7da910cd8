// Mixture of experts: which experts a token goes to, and their weighted sum.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"
#include "linear.h"

namespace kvmesh {

// How logits become scores and scores a choice. Softmax: Qwen3-MoE. Sigmoid with bias and groups: DeepSeek-V3's report
// (arXiv 2412.19437), section 2.1.2: the bias takes part in the choice and not in the weights, and only the experts of
// the `top_groups` groups with the largest sum of their two best are chosen from.
struct Router {
    bool sigmoid;
    bool normalise;  // weights of a token sum to `scale`
    float scale;
    int groups, top_groups;
    const float* bias;  // [experts], or null
};

// Of each row of `logits` [rows][experts], `per_token` experts, best first, and their weights. Equal scores go to the
// smaller number. A row's result depends on nothing else.
void route(Context& context, int rows, int experts, const float* logits, const Router& router, int per_token,
           int32_t* ids, float* weights);

// Gated linears and their way back: expert first + e is down[e](gate_up[e](x)). Where the experts are spread over ranks
// these are some of the `total` ones.
class Experts {
  public:
    // Throws std::invalid_argument where they do not fit together.
    Experts(std::vector<Linear> gate_up, std::vector<Linear> down, int first, int total);

    // out[token] += weight * expert(x[token]) over the token's experts that are here, by ascending number, so that a
    // token's bits do not depend on the others'. `ids` lie in 0 .. total() - 1, no
    // two of a token the same.
    void run(Context& context, int rows, int per_token, const int32_t* ids, const float* weights, const float* x,
             float* out) const;

    int total() const { return total_; }
    int count() const { return static_cast<int>(down_.size()); }
    int inputs() const { return gate_up_.front().inputs(); }
    int outputs() const { return down_.front().outputs(); }

  private:
    std::vector<Linear> gate_up_, down_;
    int first_, total_;
};

}  // namespace kvmesh
