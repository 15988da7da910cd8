#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace kvmesh {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

// The largest of `n` values that is not `taken`; the first of equal ones. There is one.
int best(int n, const float* values, const std::vector<bool>& taken) {
    int found = -1;
    for (int i = 0; i < n; ++i)
        if (!taken[i] && (found < 0 || values[i] > values[found])) found = i;
    return found;
}

void softmax(int n, const float* logits, float* scores) {
    float top = *std::max_element(logits, logits + n), total = 0.0f;
    for (int i = 0; i < n; ++i) total += scores[i] = std::exp(logits[i] - top);
    for (int i = 0; i < n; ++i) scores[i] /= total;
}

void sigmoid(int n, const float* logits, float* scores) {
    for (int i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
}

float best_two(int n, const float* values) {
    float first = kNever, second = kNever;
    for (int i = 0; i < n; ++i) {
        if (values[i] > first)
            second = first, first = values[i];
        else if (values[i] > second)
            second = values[i];
    }
    return n > 1 ? first + second : first;
}

// Experts outside of the best groups are never chosen.
void limit_to_groups(const Router& router, int experts, float* choice) {
    int size = experts / router.groups;
    std::vector<float> sums(router.groups);
    for (int g = 0; g < router.groups; ++g) sums[g] = best_two(size, choice + g * size);
    std::vector<bool> kept(router.groups);
    for (int i = 0; i < router.top_groups; ++i) kept[best(router.groups, sums.data(), kept)] = true;
    for (int g = 0; g < router.groups; ++g)
        if (!kept[g]) std::fill_n(choice + g * size, size, kNever);
}

void route_row(int experts, const float* logits, const Router& router, int per_token, int32_t* ids, float* weights) {
    std::vector<float> scores(experts), choice;
    (router.sigmoid ? sigmoid : softmax)(experts, logits, scores.data());
    choice = scores;
    if (router.bias)
        for (int i = 0; i < experts; ++i) choice[i] += router.bias[i];
    if (router.top_groups < router.groups) limit_to_groups(router, experts, choice.data());
    std::vector<bool> taken(experts);
    float total = 1e-20f;
    for (int k = 0; k < per_token; ++k) {
        ids[k] = best(experts, choice.data(), taken);
        taken[ids[k]] = true;
        total += weights[k] = scores[ids[k]];
    }
    for (int k = 0; k < per_token; ++k)
        weights[k] = (router.normalise ? weights[k] / total : weights[k]) * router.scale;
}

}  // namespace

void route(Context& context, int rows, int experts, const float* logits, const Router& router, int per_token,
           int32_t* ids, float* weights) {
    context.pool.run(rows, [&](int64_t row, int) {
        route_row(experts, logits + row * experts, router, per_token, ids + row * per_token, weights + row * per_token);
    });
}

Experts::Experts(std::vector<Linear> gate_up, std::vector<Linear> down, int first, int total)
    : gate_up_(std::move(gate_up)), down_(std::move(down)), first_(first), total_(total) {
    if (first < 0 || first + count() > total) throw std::invalid_argument("these experts are not among so many");
    if (down_.empty() || gate_up_.size() != down_.size()) throw std::invalid_argument("an expert has two linears");
    for (size_t i = 0; i < down_.size(); ++i)
        if (!gate_up_[i].gated() || gate_up_[i].inputs() != inputs() || down_[i].outputs() != outputs() ||
            down_[i].gated() || down_[i].inputs() != gate_up_.front().results() ||
            gate_up_[i].results() != gate_up_.front().results())
            throw std::invalid_argument("the linears of the experts do not fit together");
}

void Experts::run(Context& context, int rows, int per_token, const int32_t* ids, const float* weights, const float* x,
                  float* out) const {
    // Places (token * per_token + k) by expert, and in each by token.
    int64_t total = int64_t{rows} * per_token;
    std::vector<int64_t> begins(count() + 1), places(total);
    auto here = [&](int64_t i) { return ids[i] >= first_ && ids[i] < first_ + count(); };
    for (int64_t i = 0; i < total; ++i)
        if (here(i)) ++begins[ids[i] - first_ + 1];
    int64_t most = *std::max_element(begins.begin(), begins.end());
    for (int e = 0; e < count(); ++e) begins[e + 1] += begins[e];
    std::vector<int64_t> next(begins.begin(), begins.end() - 1);
    for (int64_t i = 0; i < total; ++i)
        if (here(i)) places[next[ids[i] - first_]++] = i;

    int from = inputs(), to = outputs(), between = gate_up_.front().results();
    float* gathered = context.routed.get(most * (from + between + to));
    float *gated = gathered + most * from, *result = gated + most * between;
    for (int e = 0; e < count(); ++e) {
        const int64_t* mine = places.data() + begins[e];
        int some = static_cast<int>(begins[e + 1] - begins[e]);
        if (some == 0) continue;
        for (int i = 0; i < some; ++i) std::copy_n(x + mine[i] / per_token * from, from, gathered + int64_t{i} * from);
        gate_up_[e].run(context, some, gathered, from, gated, between, false);
        down_[e].run(context, some, gated, between, result, to, false);
        context.pool.run(some, [&](int64_t i, int) {
            float weight = weights[mine[i]];
            float* sum = out + mine[i] / per_token * to;
            for (int j = 0; j < to; ++j) sum[j] += weight * result[i * to + j];
        });
    }
}

}  // namespace kvmesh
