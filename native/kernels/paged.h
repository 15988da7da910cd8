// The paged KV cache, and attention that works on it in place.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"

namespace kvmesh {

struct CacheShape {
    int layers, pages, heads, page_size, dim;
    bool bf16;
    int latent = 0;  // above 0: no V, the first `latent` numbers of a key are its value (MLA)

    int64_t item_bytes() const { return bf16 ? 2 : 4; }
    int64_t head_bytes() const { return int64_t{page_size} * dim * item_bytes(); }
    int parts() const { return latent > 0 ? 1 : 2; }
    int value_dim() const { return latent > 0 ? latent : dim; }
    int64_t page_bytes() const { return parts() * heads * head_bytes(); }
    int64_t total_bytes() const { return int64_t{layers} * pages * page_bytes(); }
};

// A view of `[layer][page][k/v][head][token][dim]` memory that belongs to somebody else; k alone where latent.
class Cache {
  public:
    Cache(char* base, const CacheShape& shape) : shape(shape), base_(base) {}
    // K (value 0) or V (value 1) of a head in page 0 of a layer.
    char* head(int layer, int value, int head) const {
        return base_ + int64_t{layer} * shape.pages * shape.page_bytes() +
               (int64_t{value} * shape.heads + head) * shape.head_bytes();
    }
    const CacheShape shape;

  private:
    char* base_;
};

// The rows of one step: row r has counts[r] tokens at positions starts[r], starts[r] + 1, ...; their activations follow
// each other row after row. `tables` holds the page tables one after the other, row r's from table_begins[r].
class Batch {
  public:
    // Throws std::invalid_argument, with the row's number, for a row without tokens, a position below 0, a page table
    // that is too short, or a page outside of the cache.
    Batch(const Cache& cache, std::vector<int32_t> counts, std::vector<int32_t> starts, std::vector<int32_t> tables,
          std::vector<int32_t> table_begins);

    int tokens() const { return static_cast<int>(token_rows_.size()); }
    int rows() const { return static_cast<int>(counts_.size()); }
    int position(int token) const;
    const int32_t* table(int row) const { return tables_.data() + table_begins_[row]; }
    int token_row(int token) const { return token_rows_[token]; }
    int first_token(int row) const { return first_tokens_[row]; }
    int count(int row) const { return counts_[row]; }
    int start(int row) const { return starts_[row]; }

  private:
    std::vector<int32_t> counts_, starts_, tables_, table_begins_, first_tokens_, token_rows_;
};

// What turns the projections of a token into q, k and v. Pointers may be null where the model has no such norm.
struct Rotary {
    const float* table;  // [position][width]: cosines of width / 2 frequencies, then sines
    int positions;       // of the table
    int width;           // the last numbers of a head, which are rotated
    const float* q_norm;
    const float* k_norm;  // over value_dim() numbers
    float eps;
};

// Normalises and rotates q and k of `qkv` [tokens][(query_heads + parts * heads) * dim] in place and writes k and v of
// `layer` into the batch's pages. A position past the rotary table throws std::invalid_argument.
void append(Context& context, const Cache& cache, const Batch& batch, int layer, int query_heads, const Rotary& rotary,
            float* qkv);

struct Query {
    int heads;
    float scale;
    int window;  // 0: all
};

// out [tokens][heads * value_dim]: every token attends to the positions 0 .. its own of its row, or to the last
// `window` of them.
void attend(Context& context, const Cache& cache, const Batch& batch, int layer, const Query& query, const float* qkv,
            float* out);

}  // namespace kvmesh
