#include "linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "numbers.h"

namespace kvmesh {

namespace {

constexpr int kMostRows = 16;                // of a block, on any instruction set
constexpr int kSpanRows = 112;               // of one item of a large product
constexpr int64_t kGroupFloats = 128 << 10;  // half a megabyte

float read(const void* source, int64_t i, SourceType type) {
    switch (type) {
        case SourceType::f32:
            return static_cast<const float*>(source)[i];
        case SourceType::bf16:
            return float_of_bf16(static_cast<const uint16_t*>(source)[i]);
        case SourceType::f16:
            return float_of_f16(static_cast<const uint16_t*>(source)[i]);
    }
    return 0.0f;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

struct Linear::Call {
    Context& context;
    int rows;
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t out_stride;
    bool add;
};

Linear::Linear(Context& context, int outputs, int inputs, WeightType type, Gate gate)
    : outputs_(outputs), inputs_(inputs), type_(type), gate_(gate) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a linear has at least one output and one input");
    if (gated() && outputs % 2) throw std::invalid_argument("a gated linear has an even number of outputs");
    panels_ = static_cast<int>(gated() ? ceil_div(outputs / 2, kPanel / 2) : ceil_div(outputs, kPanel));
    int64_t count = int64_t{panels_} * kPanel * inputs;
    if (type == WeightType::f32) {
        f32_ = context.store.take<float>(count);
        std::memset(f32_.get(), 0, count * sizeof(float));
    } else {
        bf16_ = context.store.take<uint16_t>(count);
        std::memset(bf16_.get(), 0, count * sizeof(uint16_t));
    }
}

int64_t Linear::bytes() const { return int64_t{panels_} * kPanel * inputs_ * (type_ == WeightType::f32 ? 4 : 2); }

int Linear::column(int output) const {
    if (!gated()) return output;
    constexpr int half = kPanel / 2;
    int pair = output % results();
    return pair / half * kPanel + pair % half + (output >= results() ? half : 0);
}

int64_t Linear::place(int output) const {
    int at = column(output);
    return int64_t{at / kPanel} * inputs_ * kPanel + at % kPanel;
}

const void* Linear::panel(int index) const {
    int64_t at = int64_t{index} * inputs_ * kPanel;
    return type_ == WeightType::f32 ? static_cast<const void*>(f32_.get() + at) : bf16_.get() + at;
}

void Linear::fill(int first, int count, const void* source, SourceType type) {
    if (first < 0 || count < 0 || first + count > outputs_) throw std::invalid_argument("rows outside of the matrix");
    for (int i = 0; i < count; ++i) {
        int64_t at = place(first + i), from = int64_t{i} * inputs_;
        for (int k = 0; k < inputs_; ++k, at += kPanel) {
            if (type_ == WeightType::f32)
                f32_[at] = read(source, from + k, type);
            else if (type == SourceType::bf16)
                bf16_[at] = static_cast<const uint16_t*>(source)[from + k];
            else
                bf16_[at] = bf16_of_float(read(source, from + k, type));
        }
    }
}

void Linear::fill_bias(int first, int count, const float* source) {
    if (first < 0 || count < 0 || first + count > outputs_) throw std::invalid_argument("rows outside of the matrix");
    int64_t columns = int64_t{panels_} * kPanel;
    if (!bias_) {
        bias_ = std::shared_ptr<float[]>(new float[columns]);
        std::fill_n(bias_.get(), columns, 0.0f);
    }
    for (int i = 0; i < count; ++i) bias_[column(first + i)] = source[i];
}

void Linear::row(int output, float* out) const {
    int64_t at = place(output);
    for (int k = 0; k < inputs_; ++k, at += kPanel)
        out[k] = type_ == WeightType::f32 ? f32_[at] : float_of_bf16(bf16_[at]);
}

void Linear::finish(const Call& call, int first_row, int rows, int panel, const float* tile) const {
    constexpr int half = kPanel / 2;
    int wide = gated() ? half : kPanel;
    int first = panel * wide, count = std::min(wide, results() - first);
    for (int i = 0; i < rows; ++i, tile += kPanel) {
        float* out = call.out + (first_row + i) * call.out_stride + first;
        float biased[kPanel];
        const float* from = tile;
        if (bias_) {
            for (int j = 0; j < kPanel; ++j) biased[j] = tile[j] + bias_[int64_t{panel} * kPanel + j];
            from = biased;
        }
        if (gate_ == Gate::silu) {
            call.context.kernels.silu_mul(count, from, from + half, out);
        } else if (gate_ == Gate::gelu) {
            call.context.kernels.gelu_mul(count, from, from + half, out);
        } else if (call.add) {
            for (int j = 0; j < count; ++j) out[j] += from[j];
        } else {
            std::memcpy(out, from, count * sizeof(float));
        }
    }
}

// One block of rows: weights stream through once, converted on the way.
void Linear::run_few(const Call& call) const {
    Context& context = call.context;
    const float* a = call.x;
    if (call.rows > 1) {
        float* packed = context.packed.get(int64_t{call.rows} * inputs_);
        context.kernels.pack(call.rows, inputs_, call.x, call.x_stride, packed);
        a = packed;
    }
    PanelFn multiply = type_ == WeightType::f32 ? context.kernels.panel_f32 : context.kernels.panel_bf16;
    int share = std::max<int64_t>(1, std::min<int64_t>(ceil_div(panels_, context.pool.threads() * 4), 64));
    context.pool.run(ceil_div(panels_, share), [&](int64_t item, int) {
        alignas(64) float tile[kMostRows * kPanel];
        int end = std::min<int>(panels_, (item + 1) * share);
        for (int p = static_cast<int>(item) * share; p < end; ++p) {
            multiply(call.rows, inputs_, a, panel(p), tile);
            finish(call, 0, call.rows, p, tile);
        }
    });
}

// How the rows and panels of one large product are cut into items.
struct Linear::Grid {
    int block, blocks;  // rows of a block, and how many there are
    int span, spans;    // blocks of an item
    int group, groups;  // panels of an item: as floats they fit into the second-level cache
};

Linear::Grid Linear::grid(const Call& call) const {
    Grid g;
    g.blocks = static_cast<int>(ceil_div(call.rows, call.context.kernels.row_block));
    g.block = static_cast<int>(ceil_div(call.rows, g.blocks));  // even ones: a small rest would cost as much to feed
    g.span = std::max(1, kSpanRows / g.block), g.spans = static_cast<int>(ceil_div(g.blocks, g.span));
    g.group = static_cast<int>(std::clamp<int64_t>(kGroupFloats / (int64_t{inputs_} * kPanel), 1, 8));
    g.groups = static_cast<int>(ceil_div(panels_, g.group));
    return g;
}

// Many blocks of rows: the rows are packed first, so that every item can read them.
void Linear::run_many(const Call& call) const {
    Context& context = call.context;
    Grid g = grid(call);
    float* packed = context.packed.get(int64_t{call.rows} * inputs_);
    context.pool.run(g.blocks, [&](int64_t i, int) {
        int first = static_cast<int>(i) * g.block, count = std::min(g.block, call.rows - first);
        context.kernels.pack(count, inputs_, call.x + first * call.x_stride, call.x_stride,
                             packed + int64_t{first} * inputs_);
    });
    context.pool.run(int64_t{g.groups} * g.spans, [&](int64_t item, int thread) {
        int first_panel = static_cast<int>(item / g.spans) * g.group;
        int first_block = static_cast<int>(item % g.spans) * g.span;
        int end_panel = std::min(panels_, first_panel + g.group), end_block = std::min(g.blocks, first_block + g.span);
        const float* weights = widened(context, thread, first_panel, end_panel);
        alignas(64) float tile[kMostRows * kPanel];
        for (int b = first_block; b < end_block; ++b) {
            int first = b * g.block, count = std::min(g.block, call.rows - first);
            const float* a = packed + int64_t{first} * inputs_;
            for (int p = first_panel; p < end_panel; ++p) {
                const float* panel = weights + int64_t{p - first_panel} * inputs_ * kPanel;
                context.kernels.panel_f32(count, inputs_, a, panel, tile);
                finish(call, first, count, p, tile);
            }
        }
    });
}

// Panels [first, end) as floats: their own memory, or the thread's scratch.
const float* Linear::widened(Context& context, int thread, int first, int end) const {
    if (type_ == WeightType::f32) return static_cast<const float*>(panel(first));
    int64_t count = int64_t{end - first} * inputs_ * kPanel;
    float* wide = context.per_thread[thread].scratch.get(count);
    context.kernels.widen(count, static_cast<const uint16_t*>(panel(first)), wide);
    return wide;
}

void Linear::run(Context& context, int rows, const float* x, int64_t x_stride, float* out, int64_t out_stride,
                 bool add) const {
    if (gated() && add) throw std::invalid_argument("a gated linear does not add");
    if (rows < 1) return;
    Call call{context, rows, x, x_stride, out, out_stride, add};
    if (rows <= context.kernels.row_block)
        run_few(call);
    else
        run_many(call);
}

}  // namespace kvmesh
