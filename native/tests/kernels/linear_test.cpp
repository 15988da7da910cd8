#include "linear.h"

#include <cmath>
#include <random>

#include "check.h"

using namespace kvmesh;

namespace {

std::vector<float> numbers(int64_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> values(count);
    for (float& value : values) value = uniform(random);
    return values;
}

double activated(Gate gate, double x) {
    if (gate == Gate::silu) return x / (1 + std::exp(-x));
    return x / 2 * (1 + std::tanh(std::sqrt(2 / 3.141592653589793) * (x + 0.044715 * x * x * x)));
}

// Buffers are exactly as large as they must be, so that AddressSanitizer sees a read or write past them.
void products(Context& context, int outputs, int inputs, WeightType type, Gate gate) {
    auto weights = numbers(int64_t{outputs} * inputs, 1);
    Linear linear(context, outputs, inputs, type, gate);
    linear.fill(0, outputs, weights.data(), SourceType::f32);
    std::vector<float> used(inputs), bias = numbers(outputs, 2);
    linear.fill_bias(0, outputs, bias.data());
    for (int rows : {1, 3, 14, 15, 40}) {
        auto x = numbers(int64_t{rows} * inputs, 3);
        std::vector<float> out(int64_t{rows} * linear.results());
        linear.run(context, rows, x.data(), inputs, out.data(), linear.results(), false);
        for (int r = 0; r < rows; ++r)
            for (int o = 0; o < linear.results(); ++o) {
                auto value = [&](int output) {
                    linear.row(output, used.data());
                    double sum = bias[output];
                    for (int k = 0; k < inputs; ++k) sum += double{used[k]} * x[int64_t{r} * inputs + k];
                    return sum;
                };
                double expected = value(o);
                if (linear.gated()) expected = activated(gate, expected) * value(o + linear.results());
                CHECK(std::abs(out[int64_t{r} * linear.results() + o] - expected) < 1e-4);
            }
    }
}

}  // namespace

int main() {
    for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512}) {
        if (!has_isa(isa)) continue;
        for (int threads : {1, 3}) {
            Context context(threads, isa);
            for (WeightType type : {WeightType::f32, WeightType::bf16})
                for (Gate gate : {Gate::none, Gate::silu, Gate::gelu}) {
                    products(context, 70, 33, type, gate);
                    products(context, 32, 16, type, gate);
                    products(context, 2, 1, type, gate);
                }
        }
    }
}
