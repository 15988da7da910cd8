// Causal attention of one query tile over the paged cache, for the instruction set of this translation unit.
//
// Online softmax (Milakov and Gimelshein, 2018) over blocks of 64 tokens that lie at absolute multiples of 64. A query
// row sees the same blocks, and in each the same order of operations, in whatever tile, chunk or batch it runs and
// whatever the page size is: equal inputs give equal bits.
#pragma once

#include "gemm.h"
#include "isa.h"
#include "simd.h"
#include "transpose.h"

namespace kvmesh::KVMESH_ISA {

constexpr float kMasked = -__builtin_inff();

static inline int padded(int dim) { return (dim + kPanel - 1) / kPanel * kPanel; }

// Where a tile's working memory lies: floats, in this order.
struct Scratch {
    float* q;       // blocks of [dim][rows], scaled
    float* keys;    // [dim][64]
    float* values;  // [64][padded value_dim]
    float* scores;  // [kRows][64]
    float* out;     // [rows][padded value_dim]
    float* top;     // [rows]: running maximum
    float* total;   // [rows]: running sum
};

static int64_t attention_scratch(int dim, int value_dim, int rows) {
    int64_t wide = padded(value_dim);
    return int64_t{rows} * dim + kBlock * int64_t{dim} + kBlock * wide + kRows * kBlock + rows * wide +
           2 * int64_t{rows};
}

static Scratch carve(float* p, int dim, int value_dim, int rows) {
    Scratch s;
    s.keys = p, p += kBlock * int64_t{dim};
    s.values = p, p += kBlock * int64_t{padded(value_dim)};
    s.scores = p, p += kRows * kBlock;
    s.q = p, p += int64_t{rows} * dim;
    s.out = p, p += int64_t{rows} * padded(value_dim);
    s.top = p, p += rows;
    s.total = p;
    return s;
}

// Row r's query, scaled, into blocks of up to kRows rows.
static void pack_queries(const AttentionTile& t, float* q) {
    int rows = t.tokens * t.group;
    for (int first = 0; first < rows; first += kRows) {
        int count = rows - first < kRows ? rows - first : kRows;
        for (int i = 0; i < count; ++i) {
            int row = first + i;
            const float* from = t.q + (row / t.group) * t.q_stride + (row % t.group) * t.dim;
            for (int d = 0; d < t.dim; ++d) q[int64_t{d} * count + i] = from[d] * t.scale;
        }
        q += int64_t{count} * t.dim;
    }
}

// Asks for keys and values before they are needed, some tokens at a time between pieces of work: pages lie scattered,
// and the processor's own prefetching starts anew in each.
class Ahead {
  public:
    Ahead(const AttentionTile& t, int first, int end)
        : t_(t), left_(end - first), bytes_(int64_t{t.dim} * (t.bf16 ? 2 : 4)) {
        if (left_ > 0) page_ = t.pages + first / t.page_size, slot_ = first % t.page_size;
    }
    void fetch(int tokens) {
        for (; tokens > 0 && left_ > 0; --tokens, --left_) {
            const char* at = t_.keys + *page_ * t_.page_bytes + slot_ * bytes_;
            for (int64_t byte = 0; byte < bytes_; byte += 64) {
                __builtin_prefetch(at + byte, 0, 2);
                __builtin_prefetch(at + (t_.values - t_.keys) + byte, 0, 2);
            }
            if (++slot_ == t_.page_size) ++page_, slot_ = 0;
        }
    }

  private:
    const AttentionTile& t_;
    const int32_t* page_ = nullptr;
    int slot_ = 0, left_;
    int64_t bytes_;
};

// The first `count` of tokens block .. block + 63: K transposed, V padded. Columns past them are repeats: always
// masked.
template <class T>
static void load_block(const AttentionTile& t, int block, int count, const Scratch& s, Ahead& ahead) {
    const T* keys[kBlock];
    int wide = padded(t.value_dim);
    for (int i = 0; i < count;) {
        int token = block + i, slot = token % t.page_size;
        int run = t.page_size - slot < count - i ? t.page_size - slot : count - i;
        int64_t page = int64_t{t.pages[token / t.page_size]} * t.page_bytes;
        const T* key = reinterpret_cast<const T*>(t.keys + page) + int64_t{slot} * t.dim;
        const T* value = reinterpret_cast<const T*>(t.values + page) + int64_t{slot} * t.dim;
        for (int end = i + run; i < end; ++i, key += t.dim, value += t.dim) {
            keys[i] = key;
            float* to = s.values + int64_t{i} * wide;
            int d = 0;
            for (; d + W <= t.value_dim; d += W) store(to + d, load(value + d));
            for (; d < wide; ++d) to[d] = d < t.value_dim ? to_float(value[d]) : 0.0f;
            if (i % 4 == 3) ahead.fetch(1);
        }
    }
    int whole = (count + W - 1) / W * W;
    for (int i = count; i < whole; ++i) keys[i] = keys[0];
    for (int i = 0; i < whole; i += W) {
        transpose_rows(t.dim, keys + i, s.keys + i, kBlock);
        ahead.fetch(W / 2);
    }
}

// One row's scores become weights; its sum, maximum and output so far are rescaled. The row sees the tokens
// [hidden, visible) of this block, 1 or more.
static inline void soften(float* scores, int hidden, int visible, float* top, float* total, float* out, int wide) {
    constexpr int kParts = kBlock / W;
    for (int i = 0; i < hidden; ++i) scores[i] = kMasked;
    for (int i = visible; i < kBlock; ++i) scores[i] = kMasked;
    vf part[kParts];
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) part[i] = load(scores + i * W);
    vf best = part[0];
#pragma GCC unroll 16
    for (int i = 1; i < kParts; ++i) best = vmax(best, part[i]);
    float block_top = peak(best), old_top = *top;
    float new_top = block_top > old_top ? block_top : old_top;
    vf shift = splat(new_top), sums = zero();
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) {
        part[i] = vexp(part[i] - shift);
        store(scores + i * W, part[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) sums = sums + part[i];
    float before = *total;
    if (new_top > old_top) {
        vf factor = vexp(splat(old_top - new_top));
        before *= first(factor);
        for (int d = 0; d < wide; d += W) store(out + d, load(out + d) * factor);
        *top = new_top;
    }
    *total = before + sum(sums);
}

// `count` tokens of the block are there.
template <int R>
static void attend_rows(const AttentionTile& t, int first_row, int block, int count, const float* q, const Scratch& s) {
    int wide = padded(t.value_dim);
    strips<R, 1, R, false>(padded(count), t.dim, q, s.keys, kBlock, s.scores, kBlock);
    for (int i = 0; i < R; ++i) {
        int row = first_row + i;
        int visible = t.position + row / t.group - block + 1;
        int hidden = t.window > 0 && visible > t.window ? visible - t.window : 0;
        float* scores = s.scores + i * kBlock;
        if (visible <= 0 || hidden >= kBlock)
            for (int j = 0; j < kBlock; j += W) store(scores + j, zero());
        else
            soften(scores, hidden, visible, s.top + row, s.total + row, s.out + int64_t{row} * wide, wide);
    }
    strips<R, kBlock, 1, true>(wide, count, s.scores, s.values, wide, s.out + int64_t{first_row} * wide, wide);
}

template <int R>
static void attend_from(int rows, const AttentionTile& t, int first, int block, int count, const float* q,
                        const Scratch& s) {
    if (rows == R)
        attend_rows<R>(t, first, block, count, q, s);
    else if constexpr (R > 1)
        attend_from<R - 1>(rows, t, first, block, count, q, s);
}

static void write_out(const AttentionTile& t, const Scratch& s) {
    int rows = t.tokens * t.group, wide = padded(t.value_dim);
    for (int row = 0; row < rows; ++row) {
        float* to = t.out + (row / t.group) * t.out_stride + (row % t.group) * t.value_dim;
        const float* from = s.out + int64_t{row} * wide;
        float factor = 1.0f / s.total[row];
        for (int d = 0; d < t.value_dim; ++d) to[d] = from[d] * factor;
    }
}

// Where the tile's first token begins to see.
static inline int first_block(const AttentionTile& t) {
    int hidden = t.window > 0 && t.position >= t.window ? t.position - t.window + 1 : 0;
    return hidden / kBlock * kBlock;
}

static void attention(const AttentionTile& t, float* memory) {
    int rows = t.tokens * t.group, wide = padded(t.value_dim), end = t.position + t.tokens;
    Scratch s = carve(memory, t.dim, t.value_dim, rows);
    pack_queries(t, s.q);
    for (int64_t i = 0; i < int64_t{rows} * wide; i += W) store(s.out + i, zero());
    for (int i = 0; i < rows; ++i) s.top[i] = kMasked, s.total[i] = 0.0f;
    for (int block = first_block(t); block < end; block += kBlock) {
        int count = end - block < kBlock ? end - block : kBlock;
        int after = block + kBlock, until = after + kBlock < end ? after + kBlock : end;
        Ahead ahead(t, after, until);
        if (t.bf16)
            load_block<uint16_t>(t, block, count, s, ahead);
        else
            load_block<float>(t, block, count, s, ahead);
        const float* q = s.q;
        for (int first = 0; first < rows; first += kRows) {
            int some = rows - first < kRows ? rows - first : kRows;
            int last_position = t.position + (first + some - 1) / t.group;
            if (last_position >= block) attend_from<kRows>(some, t, first, block, count, q, s);
            q += int64_t{some} * t.dim;
            ahead.fetch(kBlock);
        }
    }
    write_out(t, s);
}

}  // namespace kvmesh::KVMESH_ISA
