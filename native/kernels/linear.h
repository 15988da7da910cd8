// A matrix of weights, packed into panels of 32 columns, and its product with rows of activations.
#pragma once

#include <cstdint>
#include <memory>

#include "context.h"

namespace kvmesh {

enum class WeightType { f32, bf16 };

// How a checkpoint stores a number.
enum class SourceType { f32, bf16, f16 };

// What becomes of a pair of outputs; none: they are not pairs.
enum class Gate { none, silu, gelu };

// y = W x + b with W [outputs, inputs]. Packed: [panel][input][32 outputs], so that a product streams through memory;
// it lies in the context's store. Gated: outputs come in pairs (gate, up), 16 + 16 a panel, and y = act(gate) * up has
// outputs / 2 values.
class Linear {
  public:
    Linear(Context& context, int outputs, int inputs, WeightType type, Gate gate);

    // Rows [first, first + count) of the matrix, from `count` rows of `inputs` numbers. A gated matrix counts gates
    // 0 .. outputs/2 - 1 and then ups.
    void fill(int first, int count, const void* source, SourceType type);
    void fill_bias(int first, int count, const float* source);

    // out[i] = W x[i] + b for `rows` rows, or out[i] += ... where `add`. Strides in floats. Not where gated and add.
    void run(Context& context, int rows, const float* x, int64_t x_stride, float* out, int64_t out_stride,
             bool add) const;

    // Row `output` of the matrix as floats: the embedding of a token where the matrix is tied to it.
    void row(int output, float* out) const;

    int outputs() const { return outputs_; }
    int inputs() const { return inputs_; }
    int results() const { return gated() ? outputs_ / 2 : outputs_; }
    bool gated() const { return gate_ != Gate::none; }
    int64_t bytes() const;

  private:
    struct Call;
    struct Grid;

    int64_t place(int output) const;  // of the output's weight for input 0
    int column(int output) const;     // panel * 32 + lane
    const void* panel(int index) const;
    void finish(const Call& call, int first_row, int rows, int panel, const float* tile) const;
    Grid grid(const Call& call) const;
    const float* widened(Context& context, int thread, int first, int end) const;
    void run_few(const Call& call) const;
    void run_many(const Call& call) const;

    int outputs_, inputs_, panels_;
    WeightType type_;
    Gate gate_;
    std::shared_ptr<float[]> f32_;
    std::shared_ptr<uint16_t[]> bf16_;
    std::shared_ptr<float[]> bias_;  // by column; null where none
};

}  // namespace kvmesh
