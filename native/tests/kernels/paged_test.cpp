#include "paged.h"

#include <cmath>
#include <random>
#include <stdexcept>

#include "check.h"

using namespace kvmesh;

namespace {

// One sequence, appended and attended in uneven chunks by several threads, in a cache without a byte to spare. Every
// value is a constant, so that every result is that constant, whatever the weights.
void constant_values(Isa isa, const CacheShape& shape, int group, int window = 0) {
    Context context(3, isa);
    std::vector<char> memory(shape.total_bytes());
    Cache cache(memory.data(), shape);
    int heads = shape.heads * group, width = (heads + shape.parts() * shape.heads) * shape.dim,
        tokens = shape.pages * shape.page_size;
    std::vector<int32_t> table(shape.pages);
    for (int i = 0; i < shape.pages; ++i) table[i] = shape.pages - 1 - i;
    int rotated = shape.latent ? shape.dim - shape.latent : shape.dim;
    int first_value = (heads + (shape.parts() - 1) * shape.heads) * shape.dim;
    std::vector<float> rotary(int64_t{tokens} * rotated);
    for (size_t i = 0; i < rotary.size(); ++i) rotary[i] = i % rotated < static_cast<size_t>(rotated) / 2 ? 1.0f : 0.0f;
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int start = 0, count = 1; start < tokens; start += count, count = std::min(count * 3, tokens - start)) {
        Batch batch(cache, {count}, {start}, table, {0});
        std::vector<float> qkv(int64_t{count} * width), out(int64_t{count} * heads * shape.value_dim());
        for (size_t i = 0; i < qkv.size(); ++i)
            qkv[i] =
                static_cast<int>(i % width) >= first_value && i % shape.dim < static_cast<size_t>(shape.value_dim())
                    ? 0.5f
                    : uniform(random);
        for (int layer = 0; layer < shape.layers; ++layer) {
            append(context, cache, batch, layer, heads, {rotary.data(), tokens, rotated, nullptr, nullptr, 1e-6f},
                   qkv.data());
            attend(context, cache, batch, layer, Query{heads, 1.0f, window}, qkv.data(), out.data());
            for (float value : out) CHECK(std::abs(value - 0.5f) < 1e-5f);
        }
    }
    CHECK_THROWS(std::invalid_argument, Batch(cache, {1}, {tokens}, table, {0}));
}

}  // namespace

int main() {
    for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512}) {
        if (!has_isa(isa)) continue;
        constant_values(isa, {2, 5, 2, 16, 64, true}, 3);
        constant_values(isa, {1, 40, 1, 5, 6, false}, 7);
        constant_values(isa, {1, 3, 3, 70, 40, true}, 1);
        constant_values(isa, {1, 150, 1, 1, 16, false}, 2);
        constant_values(isa, {1, 40, 1, 5, 16, false}, 3, 70);
        constant_values(isa, {1, 40, 2, 5, 16, true}, 3, 1);
        constant_values(isa, {2, 40, 1, 5, 46, true, 38}, 33);
        constant_values(isa, {1, 9, 1, 16, 18, false, 16}, 70, 20);
    }
}
