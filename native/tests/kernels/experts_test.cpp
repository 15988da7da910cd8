#include "experts.h"

#include <random>
#include <stdexcept>

#include "check.h"

using namespace kvmesh;

namespace {

std::vector<float> random_values(int64_t count, int seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> values(count);
    for (float& value : values) value = uniform(random);
    return values;
}

Linear filled(Context& context, int outputs, int inputs, Gate gate, int seed) {
    Linear linear(context, outputs, inputs, WeightType::bf16, gate);
    linear.fill(0, outputs, random_values(int64_t{outputs} * inputs, seed).data(), SourceType::f32);
    return linear;
}

// Tokens that go where the router sends them, all together and one by one: the same bits.
void alone_and_together(Isa isa, int count, int groups, int per_token) {
    constexpr int kTokens = 50, kHidden = 21, kBetween = 19;
    Context context(3, isa);
    std::vector<Linear> gate_up, down;
    for (int e = 0; e < count; ++e) {
        gate_up.push_back(filled(context, 2 * kBetween, kHidden, e % 2 ? Gate::silu : Gate::gelu, e));
        down.push_back(filled(context, kHidden, kBetween, Gate::none, 100 + e));
    }
    Experts experts(gate_up, down, 0, count);
    auto logits = random_values(kTokens * count, 1), bias = random_values(count, 2),
         x = random_values(kTokens * kHidden, 3);
    Router router{groups > 1, true, 2.0f, groups, (groups + 1) / 2, groups > 1 ? bias.data() : nullptr};
    std::vector<int32_t> ids(kTokens * per_token);
    std::vector<float> weights(ids.size()), together(x.size()), alone(x.size());
    route(context, kTokens, count, logits.data(), router, per_token, ids.data(), weights.data());
    experts.run(context, kTokens, per_token, ids.data(), weights.data(), x.data(), together.data());
    for (int i = 0; i < kTokens; ++i) {
        float total = 0.0f;
        for (int k = 0; k < per_token; ++k) total += weights[i * per_token + k];
        CHECK(total > 1.999f && total < 2.001f);
        experts.run(context, 1, per_token, ids.data() + i * per_token, weights.data() + i * per_token,
                    x.data() + i * kHidden, alone.data() + i * kHidden);
    }
    CHECK(alone == together);
    down.pop_back();
    CHECK_THROWS(std::invalid_argument, Experts(gate_up, down, 0, count));
}

}  // namespace

int main() {
    for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512}) {
        if (!has_isa(isa)) continue;
        alone_and_together(isa, 1, 1, 1);
        alone_and_together(isa, 6, 1, 2);
        alone_and_together(isa, 12, 4, 6);
    }
}
