// shared.models._kernels. With communicator.cpp, the only files of the kernels that know Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "context.h"
#include "experts.h"
#include "layer_counter.h"
#include "linear.h"
#include "paged.h"
#include "sampling.h"

using namespace nb::literals;

namespace {

using namespace kvmesh;

void fill(Linear& linear, int first, const Matrix<const float>& source) {
    require(columns(source) == linear.inputs(), "source has another number of inputs");
    nb::gil_scoped_release unlocked;
    linear.fill(first, rows(source), source.data(), SourceType::f32);
}

void fill_half(Linear& linear, int first, const Matrix<const uint16_t>& source, const std::string& type) {
    require(columns(source) == linear.inputs(), "source has another number of inputs");
    require(type == "bfloat16" || type == "float16", "type: takes bfloat16 or float16");
    nb::gil_scoped_release unlocked;
    linear.fill(first, rows(source), source.data(), type == "bfloat16" ? SourceType::bf16 : SourceType::f16);
}

void run_linear(const Linear& linear, Context& context, const Matrix<const float>& x, const Matrix<float>& out,
                bool add) {
    require(columns(x) == linear.inputs() && columns(out) == linear.results() && rows(x) == rows(out),
            "x is [rows, inputs], out is [rows, results]");
    nb::gil_scoped_release unlocked;
    linear.run(context, rows(x), x.data(), linear.inputs(), out.data(), linear.results(), add);
}

// Linears over columns of one array, into columns of another: linear i reads x_first + i * x_step and on, and writes
// out_first + i * out_step and on.
struct Columns {
    std::vector<Linear> linears;
    int x_first, x_step, out_first, out_step;
};

void run_columns(const Columns& c, Context& context, const Matrix<const float>& x, const Matrix<float>& out) {
    int last = static_cast<int>(c.linears.size()) - 1;
    require(rows(x) == rows(out), "x and out have as many rows");
    for (int i = 0; i <= last; ++i)
        require(c.x_first + i * c.x_step + c.linears[i].inputs() <= columns(x) &&
                    c.out_first + i * c.out_step + c.linears[i].results() <= columns(out),
                "columns outside of x or out");
    nb::gil_scoped_release unlocked;
    for (int i = 0; i <= last; ++i)
        c.linears[i].run(context, rows(x), x.data() + c.x_first + int64_t{i} * c.x_step, columns(x),
                         out.data() + c.out_first + int64_t{i} * c.out_step, columns(out), false);
}

Gate gate_named(bool gated, const std::string& activation) {
    require(activation == "silu" || activation == "gelu_tanh", "activation: takes silu or gelu_tanh");
    if (!gated) return Gate::none;
    return activation == "silu" ? Gate::silu : Gate::gelu;
}

// The scores and the choice of a router; keeps its bias alive.
struct RouterHolder {
    nb::object bias;
    size_t bias_size;
    Router router;
};

void route_rows(const RouterHolder& holder, Context& context, const Matrix<const float>& logits,
                const Matrix<int32_t>& ids, const Matrix<float>& weights) {
    const Router& router = holder.router;
    int experts = columns(logits), per_token = columns(ids);
    require(rows(ids) == rows(logits) && rows(weights) == rows(logits) && columns(weights) == per_token,
            "ids and weights are [rows, per_token]");
    require(experts % router.groups == 0 && per_token >= 1 && per_token <= experts / router.groups * router.top_groups,
            "the chosen groups have fewer experts than a token takes");
    require(!router.bias || holder.bias_size == static_cast<size_t>(experts), "one bias an expert");
    nb::gil_scoped_release unlocked;
    route(context, rows(logits), experts, logits.data(), router, per_token, ids.data(), weights.data());
}

void run_experts(const Experts& experts, Context& context, const Matrix<const int32_t>& ids,
                 const Matrix<const float>& weights, const Matrix<const float>& x, const Matrix<float>& out) {
    int n = rows(x), per_token = columns(ids);
    require(rows(ids) == n && rows(weights) == n && columns(weights) == per_token, "ids, weights: [rows, per_token]");
    require(columns(x) == experts.inputs() && rows(out) == n && columns(out) == experts.outputs(), "x, out: one a row");
    for (int64_t i = 0; i < int64_t{n} * per_token; ++i)
        require(ids.data()[i] >= 0 && ids.data()[i] < experts.total(), "no such expert");
    nb::gil_scoped_release unlocked;
    experts.run(context, n, per_token, ids.data(), weights.data(), x.data(), out.data());
}

void embed(const Linear& linear, Context& context, const Vector<const int32_t>& tokens, const Matrix<float>& out) {
    require(rows(out) == static_cast<int>(tokens.shape(0)) && columns(out) == linear.inputs(),
            "out is [tokens, inputs]");
    for (size_t i = 0; i < tokens.shape(0); ++i)
        require(tokens.data()[i] >= 0 && tokens.data()[i] < linear.outputs(), "a token outside of the vocabulary");
    nb::gil_scoped_release unlocked;
    context.pool.run(static_cast<int64_t>(tokens.shape(0)),
                     [&](int64_t i, int) { linear.row(tokens.data()[i], out.data() + i * linear.inputs()); });
}

void rms_norm(Context& context, const Matrix<const float>& x, const Vector<const float>& weight, float eps,
              const Matrix<float>& out) {
    int n = columns(x);
    require(columns(out) == n && rows(out) == rows(x) && static_cast<int>(weight.shape(0)) == n, "shapes differ");
    nb::gil_scoped_release unlocked;
    constexpr int kShare = 16;
    context.pool.run((rows(x) + kShare - 1) / kShare, [&](int64_t item, int) {
        int end = std::min<int>(rows(x), (item + 1) * kShare);
        for (int64_t i = item * kShare; i < end; ++i)
            context.kernels.rms_norm(n, x.data() + i * n, weight.data(), eps, out.data() + i * n);
    });
}

Cache make_cache(const nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>& memory, int layers,
                 int pages, int heads, int page_size, int dim, const std::string& dtype, int latent) {
    require(dtype == "float32" || dtype == "bfloat16", "dtype: takes float32 or bfloat16");
    require(layers > 0 && pages > 0 && heads > 0 && page_size > 0 && dim > 0, "every size is at least 1");
    require(latent >= 0 && latent < dim, "latent is below dim");
    CacheShape shape{layers, pages, heads, page_size, dim, dtype == "bfloat16", latent};
    require(static_cast<int64_t>(memory.shape(0)) >= shape.total_bytes(), "memory is too small for this shape");
    return Cache(reinterpret_cast<char*>(memory.data()), shape);
}

// The rotary embedding and head norms of a model; keeps its arrays alive.
struct RotaryHolder {
    Matrix<const float> table;
    nb::object q_norm, k_norm;
    int q_normed, k_normed;  // weights; 0: no norm
    Rotary rotary;
};

std::pair<const float*, int> optional_vector(const nb::object& vector) {
    if (vector.is_none()) return {nullptr, 0};
    auto array = nb::cast<Vector<const float>>(vector);
    return {array.data(), static_cast<int>(array.shape(0))};
}

template <class M>
void check_qkv(const CacheShape& shape, const Batch& batch, int layer, int query_heads, const M& qkv) {
    require(layer >= 0 && layer < shape.layers, "no such layer");
    require(rows(qkv) == batch.tokens() && columns(qkv) == (query_heads + shape.parts() * shape.heads) * shape.dim,
            "qkv is [tokens, (query_heads + 2 * kv_heads) * head_dim], of a latent cache without the 2");
}

void append_kv(const Cache& cache, Context& context, const Batch& batch, int layer, int query_heads,
               const RotaryHolder& holder, const Matrix<float>& qkv) {
    const CacheShape& shape = cache.shape;
    check_qkv(shape, batch, layer, query_heads, qkv);
    require(columns(holder.table) == (shape.latent ? shape.dim - shape.latent : shape.dim),
            "the rotary table is for another head_dim");
    require((!holder.q_normed || holder.q_normed == shape.dim) &&
                (!holder.k_normed || holder.k_normed == shape.value_dim()),
            "a head norm has head_dim weights, that of a latent as many as it");
    nb::gil_scoped_release unlocked;
    append(context, cache, batch, layer, query_heads, holder.rotary, qkv.data());
}

void attend_kv(const Cache& cache, Context& context, const Batch& batch, int layer, int query_heads, float scale,
               const Matrix<const float>& qkv, const Matrix<float>& out, int window) {
    const CacheShape& shape = cache.shape;
    check_qkv(shape, batch, layer, query_heads, qkv);
    require(window >= 0, "window is 0 or more");
    require(query_heads > 0 && query_heads % shape.heads == 0, "query_heads is a multiple of the KV heads");
    require(rows(out) == batch.tokens() && columns(out) == query_heads * shape.value_dim(),
            "out is [tokens, query_heads * head_dim], of a latent cache query_heads * latent");
    nb::gil_scoped_release unlocked;
    attend(context, cache, batch, layer, Query{query_heads, scale, window}, qkv.data(), out.data());
}

void sample_rows(Context& context, const Matrix<const float>& logits, const Matrix<const double>& draws,
                 const Vector<int32_t>& out) {
    require(columns(draws) == 5 && rows(draws) == rows(logits) && static_cast<int>(out.shape(0)) == rows(logits),
            "draws is [rows, 5]: temperature, top_p, min_p, top_k, uniform");
    nb::gil_scoped_release unlocked;
    context.pool.run(rows(logits), [&](int64_t i, int thread) {
        const double* d = draws.data() + i * 5;
        Draw draw{static_cast<float>(d[0]), static_cast<float>(d[1]), static_cast<float>(d[2]), static_cast<int>(d[3]),
                  d[4]};
        out.data()[i] = sample(context.kernels, columns(logits), logits.data() + i * columns(logits), draw,
                               context.per_thread[thread].scratch);
    });
}

// The layer counter of one executor; keeps its memory alive.
struct LayerCounter {
    Vector<uint64_t> word;
};

}  // namespace

NB_MODULE(_kernels, m) {
    m.doc() = "CPU kernels: packed linears, paged attention, sampling. Arrays are C-contiguous NumPy arrays.";

    nb::class_<Context>(m, "Context",
                        "Threads, the instruction set in use, and scratch memory. Used by one thread at a time.")
        .def(
            "__init__",
            [](Context* self, int threads, const std::string& isa) { new (self) Context(threads, parse_isa(isa)); },
            "threads"_a, "isa"_a = "auto")
        .def_prop_ro("threads", [](const Context& c) { return c.pool.threads(); })
        .def_prop_ro("isa", [](const Context& c) { return std::string(isa_name(c.isa)); });

    nb::class_<Linear>(m, "Linear",
                       "A packed matrix of weights [outputs, inputs]; gated: activation(gate) * up of its two halves.")
        .def(
            "__init__",
            [](Linear* self, Context& context, int outputs, int inputs, const std::string& dtype, bool gated,
               const std::string& activation) {
                require(dtype == "float32" || dtype == "bfloat16", "dtype: takes float32 or bfloat16");
                new (self) Linear(context, outputs, inputs, dtype == "float32" ? WeightType::f32 : WeightType::bf16,
                                  gate_named(gated, activation));
            },
            "context"_a, "outputs"_a, "inputs"_a, "dtype"_a, nb::kw_only(), "gated"_a = false, "activation"_a = "silu")
        .def("fill", &fill, "first"_a, "source"_a, "Rows first.. of the matrix from float32 [rows, inputs].")
        .def("fill_half", &fill_half, "first"_a, "source"_a, "type"_a, "The same from raw bfloat16 or float16.")
        .def(
            "fill_bias",
            [](Linear& self, int first, const Vector<const float>& source) {
                self.fill_bias(first, static_cast<int>(source.shape(0)), source.data());
            },
            "first"_a, "source"_a)
        .def("run", &run_linear, "context"_a, "x"_a, "out"_a, nb::kw_only(), "add"_a = false,
             "out = W x + b, or out += W x + b.")
        .def("embed", &embed, "context"_a, "tokens"_a, "out"_a, "Rows `tokens` of the matrix.")
        .def_prop_ro("outputs", &Linear::outputs)
        .def_prop_ro("inputs", &Linear::inputs)
        .def_prop_ro("results", &Linear::results)
        .def_prop_ro("bytes", &Linear::bytes);

    nb::class_<Columns>(m, "Columns",
                        "Linears over columns of one array: linear i reads from x_first + i * x_step on, and writes "
                        "from out_first + i * out_step on.")
        .def(
            "__init__",
            [](Columns* self, std::vector<Linear> linears, int x_first, int x_step, int out_first, int out_step) {
                require(x_first >= 0 && x_step >= 0 && out_first >= 0 && out_step >= 0, "columns are 0 or more");
                new (self) Columns{std::move(linears), x_first, x_step, out_first, out_step};
            },
            "linears"_a, nb::kw_only(), "x_first"_a = 0, "x_step"_a = 0, "out_first"_a = 0, "out_step"_a = 0)
        .def("run", &run_columns, "context"_a, "x"_a, "out"_a);

    nb::class_<RouterHolder>(m, "Router",
                             "From logits to experts: softmax, or sigmoid with a bias and groups (DeepSeek-V3).")
        .def(
            "__init__",
            [](RouterHolder* self, bool sigmoid, bool normalise, float scale, int groups, int top_groups,
               nb::object bias) {
                require(groups >= 1 && top_groups >= 1 && top_groups <= groups, "1 <= top_groups <= groups");
                auto [values, size] = optional_vector(bias);
                new (self) RouterHolder{std::move(bias), static_cast<size_t>(size),
                                        Router{sigmoid, normalise, scale, groups, top_groups, values}};
            },
            nb::kw_only(), "sigmoid"_a, "normalise"_a, "scale"_a, "groups"_a, "top_groups"_a, "bias"_a.none())
        .def("route", &route_rows, "context"_a, "logits"_a, "ids"_a, "weights"_a,
             "Fills ids and weights [rows, per_token], best first; equal scores go to the smaller number.");

    nb::class_<Experts>(
        m, "Experts",
        "Gated linears and their way back, numbered from `first` on, of `total`; copies share the weights.")
        .def(
            "__init__",
            [](Experts* self, std::vector<Linear> gate_up, std::vector<Linear> down, int first,
               std::optional<int> total) {
                int all = total.value_or(first + static_cast<int>(down.size()));
                new (self) Experts(std::move(gate_up), std::move(down), first, all);
            },
            "gate_up"_a, "down"_a, nb::kw_only(), "first"_a = 0, "total"_a.none() = nb::none())
        .def("add", &run_experts, "context"_a, "ids"_a, "weights"_a, "x"_a, "out"_a,
             "out[row] += weight * expert(x[row]), by ascending expert, over those that are here.");

    nb::class_<Batch>(m, "Batch", "The rows of one step, checked against the cache.")
        .def(
            "__init__",
            [](Batch* self, const Cache& cache, std::vector<int32_t> counts, std::vector<int32_t> starts,
               const Vector<const int32_t>& tables, std::vector<int32_t> table_begins) {
                new (self) Batch(cache, std::move(counts), std::move(starts),
                                 std::vector<int32_t>(tables.data(), tables.data() + tables.shape(0)),
                                 std::move(table_begins));
            },
            "cache"_a, "counts"_a, "starts"_a, "tables"_a, "table_begins"_a)
        .def_prop_ro("tokens", &Batch::tokens);

    nb::class_<RotaryHolder>(m, "Rotary",
                             "Rotary table [positions, head_dim] (cosines, sines) and optional head norms.")
        .def(
            "__init__",
            [](RotaryHolder* self, const Matrix<const float>& table, nb::object q_norm, nb::object k_norm, float eps) {
                require(columns(table) % 2 == 0, "head_dim is even");
                auto [q, q_normed] = optional_vector(q_norm);
                auto [k, k_normed] = optional_vector(k_norm);
                Rotary rotary{table.data(), rows(table), columns(table), q, k, eps};
                new (self) RotaryHolder{table, std::move(q_norm), std::move(k_norm), q_normed, k_normed, rotary};
            },
            "table"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a);

    nb::class_<Cache>(m, "Cache",
                      "A view of paged KV memory [layer][page][k/v][head][token][dim]. latent: no V, the first "
                      "`latent` numbers of a key are its value.")
        .def(
            "__init__",
            [](Cache* self, const nb::ndarray<uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>& memory,
               int layers, int pages, int heads, int page_size, int dim, const std::string& dtype, int latent) {
                new (self) Cache(make_cache(memory, layers, pages, heads, page_size, dim, dtype, latent));
            },
            nb::keep_alive<1, 2>(), "memory"_a, "layers"_a, "pages"_a, "heads"_a, "page_size"_a, "dim"_a, "dtype"_a,
            "latent"_a = 0)
        .def("append", &append_kv, "context"_a, "batch"_a, "layer"_a, "query_heads"_a, "rotary"_a, "qkv"_a,
             "Norm and rotate q and k in place; write k and v into the pages.")
        .def("attend", &attend_kv, "context"_a, "batch"_a, "layer"_a, "query_heads"_a, "scale"_a, "qkv"_a, "out"_a,
             nb::kw_only(), "window"_a = 0,
             "Causal attention of every token over its row's pages, or over the last `window` tokens.");

    nb::class_<LayerCounter>(m, "LayerCounter", "The 64-bit layer counter in shared memory.")
        .def(
            "__init__",
            [](LayerCounter* self, const Vector<uint64_t>& word) {
                require(word.shape(0) >= 1, "word holds the counter");
                new (self) LayerCounter{word};
            },
            "word"_a)
        .def("advance", [](LayerCounter& self) { return advance(self.word.data()); })
        .def(
            "wait_above",
            [](const LayerCounter& self, uint64_t value, double timeout_s) {
                nb::gil_scoped_release unlocked;
                return wait_above(self.word.data(), value, timeout_s);
            },
            "value"_a, "timeout_s"_a, "Sleep until the counter is above `value`, or the time is up; what it is then.")
        .def_prop_ro("value", [](const LayerCounter& self) { return read_counter(self.word.data()); });

    bind_communicator(m);
    m.def("rms_norm", &rms_norm, "context"_a, "x"_a, "weight"_a, "eps"_a, "out"_a);
    m.def("sample", &sample_rows, "context"_a, "logits"_a, "draws"_a, "out"_a,
          "One token a row. draws [rows, 5]: temperature, top_p, min_p, top_k, uniform. -1 where no logit is finite.");
    m.def("philox_uniform", &philox_uniform, "seed"_a, "position"_a);
    m.def(
        "philox",
        [](uint32_t k0, uint32_t k1, std::vector<uint32_t> counter) {
            require(counter.size() == 4, "counter has 4 words");
            uint32_t key[2] = {k0, k1};
            std::vector<uint32_t> out(4);
            philox(key, counter.data(), out.data());
            return out;
        },
        "k0"_a, "k1"_a, "counter"_a);
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (Isa isa : {Isa::avx512, Isa::avx2, Isa::generic})
            if (has_isa(isa)) names.emplace_back(isa_name(isa));
        return names;
    });
}
