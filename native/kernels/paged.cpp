#include "paged.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "numbers.h"

namespace kvmesh {

namespace {

// Query rows of one tile: enough that loading a block of keys costs little beside using it.
constexpr int kTileRows = 112;
// Query heads of one tile: with many heads on one key, threads share them out.
constexpr int kTileHeads = 32;

[[noreturn]] void refuse(size_t row, const std::string& what) {
    throw std::invalid_argument("row " + std::to_string(row) + ": " + what);
}

void check_row(const CacheShape& shape, size_t row, int64_t start, int64_t count, const int32_t* table,
               int64_t length) {
    if (count < 1) refuse(row, "no tokens");
    if (start < 0) refuse(row, "position " + std::to_string(start));
    int64_t needed = (start + count + shape.page_size - 1) / shape.page_size;
    if (length < needed) refuse(row, "needs " + std::to_string(needed) + " pages, has " + std::to_string(length));
    for (int64_t i = 0; i < needed; ++i)
        if (table[i] < 0 || table[i] >= shape.pages)
            refuse(row, "page " + std::to_string(table[i]) + " of " + std::to_string(shape.pages));
}

void rotate(float* x, const float* cosines, int dim) {
    int half = dim / 2;
    const float* sines = cosines + half;
    for (int i = 0; i < half; ++i) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

void write_head(char* to, const float* from, int dim, bool bf16) {
    if (bf16) {
        auto* out = reinterpret_cast<uint16_t*>(to);
        for (int d = 0; d < dim; ++d) out[d] = bf16_of_float(from[d]);
    } else {
        std::copy_n(from, dim, reinterpret_cast<float*>(to));
    }
}

}  // namespace

Batch::Batch(const Cache& cache, std::vector<int32_t> counts, std::vector<int32_t> starts, std::vector<int32_t> tables,
             std::vector<int32_t> table_begins)
    : counts_(std::move(counts)),
      starts_(std::move(starts)),
      tables_(std::move(tables)),
      table_begins_(std::move(table_begins)) {
    if (starts_.size() != counts_.size() || table_begins_.size() != counts_.size())
        throw std::invalid_argument("counts, starts and table_begins differ in length");
    int64_t size = static_cast<int64_t>(tables_.size());
    for (size_t row = 0; row < counts_.size(); ++row) {
        int64_t begin = table_begins_[row], end = row + 1 < counts_.size() ? table_begins_[row + 1] : size;
        if (begin < 0 || begin > end || end > size) refuse(row, "its page table lies outside");
        check_row(cache.shape, row, starts_[row], counts_[row], tables_.data() + begin, end - begin);
        first_tokens_.push_back(tokens());
        token_rows_.insert(token_rows_.end(), counts_[row], static_cast<int32_t>(row));
    }
}

int Batch::position(int token) const {
    int row = token_rows_[token];
    return starts_[row] + token - first_tokens_[row];
}

void append(Context& context, const Cache& cache, const Batch& batch, int layer, int query_heads, const Rotary& rotary,
            float* qkv) {
    const CacheShape& shape = cache.shape;
    for (int row = 0; row < batch.rows(); ++row)
        if (batch.start(row) + batch.count(row) > rotary.positions) refuse(row, "a position past the rotary table");
    int dim = shape.dim, heads = shape.heads, width = (query_heads + shape.parts() * heads) * dim;
    int unrotated = dim - rotary.width;
    constexpr int kShare = 8;  // tokens of one item
    context.pool.run((batch.tokens() + kShare - 1) / kShare, [&](int64_t item, int) {
        int end = std::min<int>(batch.tokens(), (item + 1) * kShare);
        for (int token = static_cast<int>(item) * kShare; token < end; ++token) {
            int position = batch.position(token);
            const float* cosines = rotary.table + int64_t{position} * rotary.width;
            float* x = qkv + int64_t{token} * width;
            for (int head = 0; head < query_heads + heads; ++head) {
                bool query = head < query_heads;
                const float* norm = query ? rotary.q_norm : rotary.k_norm;
                int normed = query ? dim : shape.value_dim();
                if (norm) context.kernels.rms_norm(normed, x + head * dim, norm, rotary.eps, x + head * dim);
                rotate(x + head * dim + unrotated, cosines, rotary.width);
            }
            int64_t page = batch.table(batch.token_row(token))[position / shape.page_size];
            int64_t at = page * shape.page_bytes() + (position % shape.page_size) * dim * shape.item_bytes();
            for (int head = 0; head < heads; ++head)
                for (int value = 0; value < shape.parts(); ++value)
                    write_head(cache.head(layer, value, head) + at, x + (query_heads + value * heads + head) * dim, dim,
                               shape.bf16);
        }
    });
}

void attend(Context& context, const Cache& cache, const Batch& batch, int layer, const Query& query, const float* qkv,
            float* out) {
    const CacheShape& shape = cache.shape;
    int all = query.heads / shape.heads, dim = shape.dim, value_dim = shape.value_dim();
    int cuts = (all + kTileHeads - 1) / kTileHeads, group = (all + cuts - 1) / cuts;
    int64_t q_stride = int64_t{query.heads + shape.parts() * shape.heads} * dim;
    int64_t out_stride = int64_t{query.heads} * value_dim;
    int per_tile = std::max(1, kTileRows / group);
    struct Place {
        int row, first, count;
    };
    std::vector<Place> places;
    for (int row = 0; row < batch.rows(); ++row)
        for (int first = 0; first < batch.count(row); first += per_tile)
            places.push_back({row, first, std::min(per_tile, batch.count(row) - first)});
    // Late tokens see most keys: they go first, so that the threads end together.
    std::stable_sort(places.begin(), places.end(), [&](const Place& a, const Place& b) {
        return batch.start(a.row) + a.first + a.count > batch.start(b.row) + b.first + b.count;
    });
    int64_t floats = context.kernels.attention_scratch(dim, value_dim, per_tile * group);
    int tiles = shape.heads * cuts;
    context.pool.run(static_cast<int64_t>(places.size()) * tiles, [&](int64_t item, int thread) {
        const Place& place = places[item / tiles];
        int head = static_cast<int>(item % tiles) / cuts, in_group = static_cast<int>(item % cuts) * group;
        int64_t first = int64_t{head} * all + in_group;
        int64_t token = batch.first_token(place.row) + place.first;
        AttentionTile tile;
        tile.q = qkv + token * q_stride + first * dim;
        tile.out = out + token * out_stride + first * value_dim;
        tile.q_stride = q_stride, tile.out_stride = out_stride;
        tile.tokens = place.count, tile.position = batch.start(place.row) + place.first;
        tile.group = std::min(group, all - in_group), tile.dim = dim, tile.value_dim = value_dim;
        tile.scale = query.scale, tile.window = query.window;
        tile.pages = batch.table(place.row);
        tile.keys = cache.head(layer, 0, head), tile.values = cache.head(layer, shape.parts() - 1, head);
        tile.page_bytes = shape.page_bytes(), tile.page_size = shape.page_size, tile.bf16 = shape.bf16;
        context.kernels.attention(tile, context.per_thread[thread].scratch.get(floats));
    });
}

}  // namespace kvmesh
