#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace kvmesh {

namespace {

constexpr float kGreedyBelow = 1e-6f;  // 1 / temperature stays finite

int32_t greatest(int vocab, const float* logits) {
    int32_t best = 0;
    for (int i = 1; i < vocab; ++i)
        if (logits[i] > logits[best] || std::isnan(logits[best])) best = i;
    return std::isfinite(logits[best]) ? best : -1;
}

// Weights likeliest first, ties by token, sorted only as far as asked.
class Ranking {
  public:
    Ranking(const float* weights, std::vector<int32_t> tokens) : weights_(weights), tokens_(std::move(tokens)) {}

    size_t size() const { return tokens_.size(); }
    int32_t operator[](size_t i) {
        while (i >= sorted_) extend();
        return tokens_[i];
    }

  private:
    void extend() {
        size_t end = std::min(tokens_.size(), sorted_ ? sorted_ * 8 : size_t{128});
        auto likelier = [this](int32_t a, int32_t b) {
            return weights_[a] != weights_[b] ? weights_[a] > weights_[b] : a < b;
        };
        auto from = tokens_.begin() + sorted_, to = tokens_.begin() + end;
        if (to != tokens_.end()) std::nth_element(from, to, tokens_.end(), likelier);
        std::sort(from, to, likelier);
        sorted_ = end;
    }

    const float* weights_;
    std::vector<int32_t> tokens_;
    size_t sorted_ = 0;
};

int32_t draw_any(int vocab, const float* weights, float least, double uniform) {
    double total = 0;
    for (int i = 0; i < vocab; ++i)
        if (weights[i] >= least) total += weights[i];
    double target = uniform * total, reached = 0;
    int32_t last = 0;
    for (int i = 0; i < vocab; ++i) {
        if (weights[i] < least || weights[i] == 0) continue;
        reached += weights[i];
        last = i;
        if (reached > target) return i;
    }
    return last;
}

int32_t draw_ranked(int vocab, const float* weights, float least, const Draw& draw) {
    std::vector<int32_t> tokens;
    double total = 0;
    for (int i = 0; i < vocab; ++i)
        if (weights[i] >= least && weights[i] > 0) tokens.push_back(i), total += weights[i];
    Ranking ranking(weights, std::move(tokens));
    size_t limit = ranking.size();
    if (draw.top_k > 0 && static_cast<size_t>(draw.top_k) < limit) {
        limit = draw.top_k;
        total = 0;
        for (size_t i = 0; i < limit; ++i) total += weights[ranking[i]];
    }
    double mass = 0;
    size_t kept = 0;
    while (kept < limit && (kept == 0 || mass < draw.top_p * total)) mass += weights[ranking[kept++]];
    double target = draw.uniform * mass, reached = 0;
    for (size_t i = 0; i + 1 < kept; ++i) {
        reached += weights[ranking[i]];
        if (reached > target) return ranking[i];
    }
    return ranking[kept - 1];
}

}  // namespace

int32_t sample(const Kernels& kernels, int vocab, const float* logits, const Draw& draw, Arena<float>& scratch) {
    int32_t best = greatest(vocab, logits);
    if (best < 0 || draw.temperature < kGreedyBelow) return best;
    float* weights = scratch.get(vocab);
    kernels.softmax_weights(vocab, logits, logits[best], 1.0f / draw.temperature, weights);
    float least = std::min(draw.min_p, 1.0f);  // the likeliest token weighs exactly 1
    if (draw.top_k <= 0 && draw.top_p >= 1.0f) return draw_any(vocab, weights, least, draw.uniform);
    return draw_ranked(vocab, weights, least, draw);
}

void philox(const uint32_t key[2], const uint32_t counter[4], uint32_t out[4]) {
    uint32_t k0 = key[0], k1 = key[1];
    std::copy_n(counter, 4, out);
    for (int round = 0; round < 10; ++round) {
        uint64_t a = uint64_t{0xD2511F53} * out[0], b = uint64_t{0xCD9E8D57} * out[2];
        uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ out[1] ^ k0, static_cast<uint32_t>(b),
                            static_cast<uint32_t>(a >> 32) ^ out[3] ^ k1, static_cast<uint32_t>(a)};
        std::copy_n(next, 4, out);
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
}

double philox_uniform(uint64_t seed, uint64_t position) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t out[4];
    philox(key, counter, out);
    uint64_t bits = (static_cast<uint64_t>(out[1]) << 32 | out[0]) >> 11;
    return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace kvmesh
