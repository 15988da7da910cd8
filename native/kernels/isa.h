// What one instruction set provides, as a table of functions, and the choice between them at run time.
#pragma once

#include <cstdint>
#include <string>

namespace kvmesh {

enum class Isa { generic, avx2, avx512 };

// The best one that this processor and this build have.
Isa best_isa();
bool has_isa(Isa isa);
const char* isa_name(Isa isa);
// "auto" or a name; throws std::invalid_argument for an unknown one and std::runtime_error for one that cannot run
// here.
Isa parse_isa(const std::string& name);

// Columns of one packed panel of weights; every instruction set reads the same packing.
constexpr int kPanel = 32;
// Tokens of one block of attention; blocks lie at multiples of it, whatever the page size.
constexpr int kBlock = 64;

// `out` of a linear: what happens to a tile of results.
enum class Epilogue { store, add, gated };

// One panel times one block of packed activations.
// `a`: [k][rows] floats. `b`: [k][32] floats or bfloat16. `tile`: [rows][32], overwritten.
using PanelFn = void (*)(int rows, int k, const float* a, const void* b, float* tile);

// One query tile of one KV head. Row r is token r / group, query head r % group.
struct AttentionTile {
    const float* q;        // first token's first query head of this KV head
    float* out;            // the same place in the output
    int64_t q_stride;      // floats from one token to the next
    int64_t out_stride;    // floats
    int tokens;            // in this tile
    int position;          // of the tile's first token
    int group;             // query heads per KV head
    int dim;               // of a query and a key; from one token of a page to the next, of values too
    int value_dim;         // of a value: the first numbers at its place
    int window;            // tokens that a token sees, itself among them; 0: all
    float scale;           // of the scores
    const int32_t* pages;  // page table of the sequence
    const char* keys;      // K of this head in page 0 of the layer
    const char* values;    // V likewise
    int64_t page_bytes;
    int page_size;
    bool bf16;
};

struct Kernels {
    int row_block;  // most rows of one call of a panel function
    PanelFn panel_f32;
    PanelFn panel_bf16;
    // [k][32] bfloat16 to floats.
    void (*widen)(int64_t count, const uint16_t* in, float* out);
    // rows x [k] at stride `ldx` to [k][rows].
    void (*pack)(int rows, int k, const float* x, int64_t ldx, float* a);
    void (*rms_norm)(int n, const float* x, const float* weight, float eps, float* out);
    // out[i] = gate[i] / (1 + e^-gate[i]) * up[i]
    void (*silu_mul)(int n, const float* gate, const float* up, float* out);
    // The same with GELU (tanh approximation) in place of SiLU.
    void (*gelu_mul)(int n, const float* gate, const float* up, float* out);
    // out[i] = e^((x[i] - top) * factor)
    void (*softmax_weights)(int n, const float* x, float top, float factor, float* out);
    int64_t (*attention_scratch)(int dim, int value_dim, int rows);  // floats
    void (*attention)(const AttentionTile&, float* scratch);
};

const Kernels& kernels(Isa isa);

namespace generic {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

}  // namespace kvmesh
