// Single ops for Python: what tests and benchmarks call. A model runs them through the program instead.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "core/memory.h"
#include "core/team.h"
#include "ops/attention_plan.h"
#include "ops/bindings_shared.h"
#include "ops/rows.h"

namespace nb = nanobind;

namespace pm {

AttentionLayer make_layer(int kv_type, int block_size, int num_heads, int num_kv_heads, int head_dim, float scale,
                          int window, float softcap, bool causal) {
  check(kv_type >= 0 && kv_type <= 2, "kv_type must be 0 (bfloat16), 1 (float32) or 2 (int8)");
  check(block_size > 0 && block_size % kGroup == 0, "block_size must be a multiple of 16");
  check(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads");
  check(head_dim > 0, "head_dim must be positive");
  check(scale > 0, "scale must be positive");
  check(window >= 0 && softcap >= 0, "window and softcap must not be negative; 0 means none");
  check(causal || window == 0, "a window goes with causal attention only");
  return {static_cast<KvType>(kv_type), block_size, num_heads, num_kv_heads, head_dim, scale, window, softcap, causal};
}

Activate activation_named(const std::string& name) {
  check(name == "gelu" || name == "tanh", "the activation must be gelu or tanh");
  return name == "gelu" ? Activate::gelu : Activate::tanh;
}

void check_batch(const AttentionLayer& layer, const AttentionBatch& batch, int64_t num_tokens, int64_t num_blocks) {
  check(batch.query_start[0] == 0 && batch.query_start[batch.num_requests] == num_tokens,
        "query_start must run from 0 to the number of tokens");
  for (int r = 0; r < batch.num_requests; ++r) {
    const int queries = batch.query_start[r + 1] - batch.query_start[r], context = batch.context_lens[r];
    check(queries > 0 && context >= queries, "a request needs a query, and a context that holds its queries");
    check(context <= batch.table_stride * layer.block_size, "a context is longer than its block table");
    const int oldest = layer.window ? std::max(0, context - queries - layer.window + 1) : 0;
    for (int b = oldest / layer.block_size; b <= (context - 1) / layer.block_size; ++b) {
      const int32_t block = batch.block_tables[r * batch.table_stride + b];
      check(block >= 0 && block < num_blocks, "a block table names a block that does not exist");
    }
  }
}

int check_norm(const Vec<const float>& norm, int heads, int head_dim) {
  if (!norm.is_valid()) return 0;
  const int size = static_cast<int>(norm.shape(0));
  check(size == head_dim || size == heads * head_dim, "a qk norm must be [head_dim] or [heads * head_dim]");
  return size;
}

namespace {

int64_t kv_block_bytes(int kv_type, int block_size, int num_kv_heads, int head_dim) {
  return make_layer(kv_type, block_size, num_kv_heads, num_kv_heads, head_dim, 1, 0, 0).block_bytes();
}

void attention(Mat<const float> query, Mat<const uint8_t> cache, Vec<const int32_t> query_start,
               Vec<const int32_t> context_lens, Mat<const int32_t> block_tables, Mat<float> out, int num_heads,
               int num_kv_heads, int head_dim, int block_size, float scale, int window, float softcap, int kv_type,
               bool causal) {
  const AttentionLayer layer =
      make_layer(kv_type, block_size, num_heads, num_kv_heads, head_dim, scale, window, softcap, causal);
  check(query.shape(1) >= static_cast<size_t>(num_heads * head_dim), "query rows are too short for the heads");
  check(out.shape(0) == query.shape(0) && out.shape(1) == static_cast<size_t>(num_heads * head_dim),
        "out must be [tokens, num_heads * head_dim]");
  check(cache.shape(1) == static_cast<size_t>(layer.block_bytes()), "cache must be [num_blocks, kv_block_bytes()]");
  check(query_start.shape(0) == context_lens.shape(0) + 1 && block_tables.shape(0) == context_lens.shape(0),
        "query_start, context_lens and block_tables disagree on the number of requests");
  AttentionBatch batch{static_cast<int>(context_lens.shape(0)), query_start.data(), context_lens.data(),
                       block_tables.data(), static_cast<int64_t>(block_tables.shape(1))};
  check_batch(layer, batch, static_cast<int64_t>(query.shape(0)), static_cast<int64_t>(cache.shape(0)));
  nb::gil_scoped_release release;
  AttentionPlan plan;
  plan.build(layer, batch, num_threads(), false);
  std::vector<float> scratch(static_cast<size_t>(num_threads() * attention_scratch_floats(layer)));
  std::vector<float> partials(static_cast<size_t>(plan.num_partials * attention_partial_floats(layer)));
  const AttentionCall call{&layer,
                           &batch,
                           cache.data(),
                           query.data(),
                           static_cast<int64_t>(query.shape(1)),
                           out.data(),
                           static_cast<int64_t>(out.shape(1)),
                           partials.data()};
  parallel([&](Team& team) {
    attention_run(team, plan, call, scratch.data() + team.rank() * attention_scratch_floats(layer));
  });
}

void rope_and_cache(Mat<float> qkv, Mat<uint8_t> cache, Vec<const int32_t> positions, Vec<const int32_t> slots,
                    Cube<const float> table, bool interleaved, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                    int num_heads, int num_kv_heads, int head_dim, int block_size, int kv_type) {
  const AttentionLayer layer = make_layer(kv_type, block_size, num_heads, num_kv_heads, head_dim, 1, 0, 0);
  const int64_t tokens = static_cast<int64_t>(qkv.shape(0));
  check(qkv.shape(1) == static_cast<size_t>((num_heads + 2 * num_kv_heads) * head_dim), "qkv has the wrong width");
  check(cache.shape(1) == static_cast<size_t>(layer.block_bytes()), "cache must be [num_blocks, kv_block_bytes()]");
  check(positions.shape(0) == qkv.shape(0) && slots.shape(0) == qkv.shape(0),
        "positions and slots need one entry for each token");
  for (int64_t i = 0; i < tokens; ++i) {
    check(slots.data()[i] < static_cast<int64_t>(cache.shape(0)) * block_size, "a slot lies past the cache");
    check(positions.data()[i] >= 0 && (!table.is_valid() || positions.data()[i] < dim(table, 0)),
          "a position lies past the rotary table");
  }
  const int rotary_dim = table.is_valid() ? 2 * static_cast<int>(table.shape(2)) : 0;
  check(rotary_dim <= head_dim, "the rotary table is wider than head_dim");
  const RopeCall call{&layer,
                      qkv.data(),
                      static_cast<int64_t>(qkv.shape(1)),
                      cache.data(),
                      positions.data(),
                      slots.data(),
                      table.is_valid() ? table.data() : nullptr,
                      rotary_dim,
                      interleaved,
                      q_norm.is_valid() ? q_norm.data() : nullptr,
                      k_norm.is_valid() ? k_norm.data() : nullptr,
                      check_norm(q_norm, num_heads, head_dim),
                      check_norm(k_norm, num_kv_heads, head_dim),
                      eps};
  nb::gil_scoped_release release;
  const int64_t floats = rope_scratch_floats(layer);
  std::vector<float> memory(static_cast<size_t>(num_threads() * floats));
  parallel([&](Team& team) {
    rope_run(team, call, 0, tokens, memory.data() + team.rank() * floats);
  });
}

void rms_norm(Mat<const float> x, Vec<const float> weight, float eps, Mat<float> out) {
  check(weight.shape(0) == x.shape(1) && out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1),
        "x, weight and out disagree");
  nb::gil_scoped_release release;
  const int64_t n = static_cast<int64_t>(x.shape(1));
  parallel([&](Team& team) {
    team.for_each(static_cast<int64_t>(x.shape(0)), [&](int64_t i) {
      pick_rows().rms_norm(x.data() + i * n, weight.data(), n, eps, out.data() + i * n);
    });
  });
}

void layer_norm(Mat<const float> x, Vec<const float> weight, Vec<const float> bias, float eps, Mat<float> out) {
  check(weight.shape(0) == x.shape(1) && bias.shape(0) == x.shape(1) && out.shape(0) == x.shape(0) &&
            out.shape(1) == x.shape(1),
        "x, weight, bias and out disagree");
  nb::gil_scoped_release release;
  const int64_t n = static_cast<int64_t>(x.shape(1));
  parallel([&](Team& team) {
    team.for_each(static_cast<int64_t>(x.shape(0)), [&](int64_t i) {
      pick_rows().layer_norm(x.data() + i * n, weight.data(), bias.data(), n, eps, out.data() + i * n);
    });
  });
}

void activate(Mat<float> x, const std::string& name) {
  const Activate which = activation_named(name);
  nb::gil_scoped_release release;
  const int64_t n = static_cast<int64_t>(x.shape(1));
  parallel([&](Team& team) {
    team.for_each(static_cast<int64_t>(x.shape(0)), [&](int64_t i) { pick_rows().activate(x.data() + i * n, n, which); });
  });
}

void scale_softcap(Mat<float> x, float scale, float cap) {
  nb::gil_scoped_release release;
  const int64_t n = static_cast<int64_t>(x.shape(1));
  parallel([&](Team& team) {
    team.for_each(static_cast<int64_t>(x.shape(0)),
                  [&](int64_t i) { pick_rows().scale_softcap(x.data() + i * n, n, scale, cap); });
  });
}

// Zeroed bytes on huge pages, untouched until they are written: a KV cache is read at random, and page walks show.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> allocate_bytes(int64_t rows, int64_t columns) {
  check(rows >= 0 && columns >= 0, "a size is negative");
  auto* memory = new Buffer(static_cast<size_t>(rows * columns));
  nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<Buffer*>(p); });
  return {memory->as<uint8_t>(), {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner};
}

// The first `bytes` of each array.
std::vector<PageWarmer::Range> warm_ranges(const std::vector<Mat<uint8_t>>& arrays, size_t bytes) {
  std::vector<PageWarmer::Range> ranges;
  for (const auto& array : arrays) {
    ranges.push_back({reinterpret_cast<std::byte*>(array.data()), std::min(bytes, array.size())});
  }
  return ranges;
}

// Holds the arrays themselves: the list that they came in may be emptied.
struct BoundWarmer {
  BoundWarmer(const std::vector<Mat<uint8_t>>& arrays, size_t bytes) : warmer(warm_ranges(arrays, bytes)) {
    for (const auto& array : arrays) kept.push_back(owner_of(array));
  }
  std::vector<nb::object> kept;
  PageWarmer warmer;
};

}  // namespace

void register_ops(nb::module_& m) {
  using namespace nb::literals;
  m.def("kv_block_bytes", &kv_block_bytes, "kv_type"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a);
  m.def("allocate_bytes", &allocate_bytes, "rows"_a, "columns"_a);
  nb::class_<BoundWarmer>(m, "PageWarmer")
      .def("__init__",
           [](BoundWarmer* self, nb::sequence arrays, size_t num_bytes) {
             new (self) BoundWarmer(array_list<Mat<uint8_t>>(arrays), num_bytes);
           },
           "arrays"_a, "num_bytes"_a);
  m.def("attention", &attention, "query"_a, "cache"_a, "query_start"_a, "context_lens"_a, "block_tables"_a, "out"_a,
        nb::kw_only(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a, "scale"_a, "window"_a = 0,
        "softcap"_a = 0.0f, "kv_type"_a = 0, "causal"_a = true);
  m.def("rope_and_cache", &rope_and_cache, "qkv"_a, "cache"_a, "positions"_a, "slots"_a, "table"_a.none(),
        nb::kw_only(), "interleaved"_a = false, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "eps"_a = 1e-6f,
        "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "block_size"_a, "kv_type"_a = 0);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a);
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a);
  m.def("activate", &activate, "x"_a, "name"_a);
  m.def("scale_softcap", &scale_softcap, "x"_a, "scale"_a, "cap"_a = 0.0f);
}

}  // namespace pm
