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
    float* keys;    // [2][dim][32]: two panels of 32 tokens
    float* values;  // [64][padded dim]
    float* scores;  // [kRows][64]
    float* out;     // [rows][padded dim]
    float* top;     // [rows]: running maximum
    float* total;   // [rows]: running sum
};

static int64_t attention_scratch(int dim, int rows) {
    int64_t wide = padded(dim);
    return int64_t{rows} * dim + 2 * kPanel * int64_t{dim} + kBlock * wide + kRows * kBlock + rows * wide +
           2 * int64_t{rows};
}

static Scratch carve(float* p, int dim, int rows) {
    Scratch s;
    s.keys = p, p += 2 * kPanel * int64_t{dim};
    s.values = p, p += kBlock * int64_t{padded(dim)};
    s.scores = p, p += kRows * kBlock;
    s.q = p, p += int64_t{rows} * dim;
    s.out = p, p += int64_t{rows} * padded(dim);
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

// Tokens block .. block + 64 of K, transposed, and of V, padded; zeros past `end`.
template <class T>
static void load_block(const AttentionTile& t, int block, int end, const Scratch& s) {
    const T* keys[kBlock];
    int wide = padded(t.dim);
    for (int i = 0; i < kBlock; ++i) {
        float* value = s.values + int64_t{i} * wide;
        int token = block + i;
        if (token >= end) {
            keys[i] = nullptr;
            for (int d = 0; d < wide; d += W) store(value + d, zero());
            continue;
        }
        int64_t page = int64_t{t.pages[token / t.page_size]} * t.page_bytes;
        int64_t slot = int64_t{token % t.page_size} * t.dim;
        keys[i] = reinterpret_cast<const T*>(t.keys + page) + slot;
        const T* from = reinterpret_cast<const T*>(t.values + page) + slot;
        int d = 0;
        for (; d + W <= t.dim; d += W) store(value + d, load(from + d));
        for (; d < wide; ++d) value[d] = d < t.dim ? to_float(from[d]) : 0.0f;
    }
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < kPanel; i += W)
            transpose_rows<T>(t.dim, keys + half * kPanel + i, s.keys + int64_t{half} * t.dim * kPanel + i, kPanel);
}

// One row's scores become weights; its sum, maximum and output so far are rescaled. `visible`: tokens of this block
// that the row may see, 1 .. 64.
static void soften(float* scores, int visible, float* top, float* total, float* out, int wide) {
    for (int i = visible; i < kBlock; ++i) scores[i] = kMasked;
    vf best = load(scores);
    for (int i = W; i < kBlock; i += W) best = vmax(best, load(scores + i));
    float block_top = peak(best);
    float new_top = block_top > *top ? block_top : *top;
    vf sums = zero();
    for (int i = 0; i < kBlock; i += W) {
        vf weight = vexp(load(scores + i) - splat(new_top));
        store(scores + i, weight);
        sums = sums + weight;
    }
    if (new_top > *top) {
        vf factor = vexp(splat(*top - new_top));
        float lane[W];
        store(lane, factor);
        *total *= lane[0];
        for (int d = 0; d < wide; d += W) store(out + d, load(out + d) * factor);
        *top = new_top;
    }
    *total += sum(sums);
}

template <int R>
static void attend_rows(const AttentionTile& t, int first, int block, const float* q, const Scratch& s) {
    int wide = padded(t.dim);
    for (int half = 0; half < 2; ++half)
        for (int j = 0; j < kPanel; j += kStrip)
            strip<R, kVecs, 1, R, false>(t.dim, q, s.keys + int64_t{half} * t.dim * kPanel + j, kPanel,
                                         s.scores + half * kPanel + j, kBlock);
    for (int i = 0; i < R; ++i) {
        int row = first + i;
        int visible = t.position + row / t.group - block + 1;
        float* scores = s.scores + i * kBlock;
        if (visible <= 0) {
            for (int j = 0; j < kBlock; j += W) store(scores + j, zero());
            continue;
        }
        soften(scores, visible, s.top + row, s.total + row, s.out + int64_t{row} * wide, wide);
    }
    for (int d = 0; d < wide; d += kStrip)
        strip<R, kVecs, kBlock, 1, true>(kBlock, s.scores, s.values + d, wide, s.out + int64_t{first} * wide + d, wide);
}

template <int R>
static void attend_from(int rows, const AttentionTile& t, int first, int block, const float* q, const Scratch& s) {
    if (rows == R)
        attend_rows<R>(t, first, block, q, s);
    else if constexpr (R > 1)
        attend_from<R - 1>(rows, t, first, block, q, s);
}

static void write_out(const AttentionTile& t, const Scratch& s) {
    int rows = t.tokens * t.group, wide = padded(t.dim);
    for (int row = 0; row < rows; ++row) {
        float* to = t.out + (row / t.group) * t.out_stride + (row % t.group) * t.dim;
        const float* from = s.out + int64_t{row} * wide;
        float factor = 1.0f / s.total[row];
        for (int d = 0; d < t.dim; ++d) to[d] = from[d] * factor;
    }
}

static void attention(const AttentionTile& t, float* memory) {
    int rows = t.tokens * t.group, wide = padded(t.dim), end = t.position + t.tokens;
    Scratch s = carve(memory, t.dim, rows);
    pack_queries(t, s.q);
    for (int64_t i = 0; i < int64_t{rows} * wide; i += W) store(s.out + i, zero());
    for (int i = 0; i < rows; ++i) s.top[i] = kMasked, s.total[i] = 0.0f;
    for (int block = 0; block < end; block += kBlock) {
        if (t.bf16)
            load_block<uint16_t>(t, block, end, s);
        else
            load_block<float>(t, block, end, s);
        const float* q = s.q;
        for (int first = 0; first < rows; first += kRows) {
            int count = rows - first < kRows ? rows - first : kRows;
            int last_position = t.position + (first + count - 1) / t.group;
            if (last_position >= block) attend_from<kRows>(count, t, first, block, q, s);
            q += int64_t{count} * t.dim;
        }
    }
    write_out(t, s);
}

}  // namespace kvmesh::KVMESH_ISA
