// Single ops for Python: what tests and benchmarks call. A model runs them through the program instead.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "core/memory.h"
#include "core/planned.h"
#include "core/team.h"
#include "ops/attention_plan.h"
#include "ops/bindings_shared.h"
#include "ops/rows.h"

namespace nb = nanobind;

namespace pm {
namespace {

constexpr int kMostTokens = 1 << 20;   // of a block
constexpr int kMostValues = 1 << 24;  // of a token's query
}  // namespace

AttentionLayer make_layer(int kv_type, int block_size, int num_heads, int num_kv_heads, int head_dim, float scale,
                          int window, float softcap, bool causal) {
  if (kv_type < 0 || kv_type > 2) refuse("kv_type is ", kv_type, "; it must be 0 (bfloat16), 1 (float32) or 2 (int8)");
  if (block_size < 1 || block_size > kMostTokens || block_size % kGroup != 0) {
    refuse("block_size is ", block_size, "; it must be a multiple of ", kGroup, " up to ", kMostTokens);
  }
  if (num_kv_heads < 1 || num_heads < 1 || num_heads % num_kv_heads != 0) {
    refuse("num_heads is ", num_heads, "; it must be a multiple of num_kv_heads, which is ", num_kv_heads);
  }
  if (head_dim < 1 || int64_t{num_heads} * head_dim > kMostValues) {
    refuse("head_dim is ", head_dim, " for ", num_heads, " heads; it must be positive, and ", kMostValues, " for all heads");
  }
  if (!(scale > 0)) refuse("scale is ", scale, "; it must be positive");
  if (window < 0 || !(softcap >= 0)) {
    refuse("window is ", window, " and softcap ", softcap, "; neither may be negative, and 0 means none");
  }
  check(causal || window == 0, "a window goes with causal attention only");
  return {static_cast<KvType>(kv_type), block_size, num_heads, num_kv_heads, head_dim, scale, window, softcap, causal};
}

Activate activation_named(const std::string& name) {
  check(name == "gelu" || name == "tanh", "the activation must be gelu or tanh");
  return name == "gelu" ? Activate::gelu : Activate::tanh;
}

void check_batch(const AttentionLayer& layer, const AttentionBatch& batch, int64_t num_tokens, int64_t num_blocks) {
  if (batch.query_start[0] != 0 || batch.query_start[batch.num_requests] != num_tokens) {
    refuse("query_start runs from ", batch.query_start[0], " to ", batch.query_start[batch.num_requests],
           "; it must run from 0 to the number of tokens, ", num_tokens);
  }
  for (int r = 0; r < batch.num_requests; ++r) {
    const int64_t queries = int64_t{batch.query_start[r + 1]} - batch.query_start[r], context = batch.context_lens[r];
    if (queries < 1 || context < queries) {
      refuse("request ", r, " has ", queries, " queries and a context of ", context,
             "; it needs a query, and a context that holds its queries");
    }
    if (context > batch.table_stride * layer.block_size) {
      refuse("the context of request ", r, " is longer than its block table: ", context, " tokens, but ", batch.table_stride,
             " blocks of ", layer.block_size);
    }
    const int64_t oldest = layer.window ? std::max(int64_t{0}, context - queries - layer.window + 1) : 0;
    for (int64_t b = oldest / layer.block_size; b <= (context - 1) / layer.block_size; ++b) {
      const int32_t block = batch.block_tables[r * batch.table_stride + b];
      if (block < 0 || block >= num_blocks) {
        refuse("the block table of request ", r, " names block ", block, ", a block that does not exist; there are ", num_blocks);
      }
    }
  }
}

int check_norm(const Vec<const float>& norm, int heads, int head_dim) {
  if (!norm.is_valid()) return 0;
  const int size = static_cast<int>(norm.shape(0));
  if (size != head_dim && size != heads * head_dim) {
    refuse("a qk norm is [", size, "]; it must be [", head_dim, "] for each head alone or [", heads * head_dim, "] for all");
  }
  return size;
}

int check_rotary(const Cube<const float>& table, int head_dim) {
  if (!table.is_valid()) return 0;
  if (dim(table, 1) != 2 || 2 * dim(table, 2) > head_dim) {
    refuse("the rotary table is [", dim(table, 0), ", ", dim(table, 1), ", ", dim(table, 2),
           "]; it must be [positions, 2, rotary_dim / 2] with an even rotary_dim of at most head_dim, which is ", head_dim);
  }
  return 2 * static_cast<int>(dim(table, 2));
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
  if (dim(query, 1) < num_heads * head_dim) {
    refuse("query has rows of ", dim(query, 1), " values; ", num_heads, " heads of ", head_dim, " need ", num_heads * head_dim);
  }
  check_shape(out, dim(query, 0), int64_t{num_heads} * head_dim, "out");
  check_shape(cache, dim(cache, 0), layer.block_bytes(), "cache");
  check_length(query_start, dim(context_lens, 0) + 1, "query_start");
  check_length(block_tables, dim(context_lens, 0), "block_tables");
  AttentionBatch batch{static_cast<int>(context_lens.shape(0)), query_start.data(), context_lens.data(),
                       block_tables.data(), static_cast<int64_t>(block_tables.shape(1))};
  check_batch(layer, batch, static_cast<int64_t>(query.shape(0)), static_cast<int64_t>(cache.shape(0)));
  nb::gil_scoped_release release;
  AttentionPlan plan;
  std::vector<float> scratch, partials;
  AttentionCall call{&layer, &batch, cache.data(), query.data(), dim(query, 1), out.data(), dim(out, 1), nullptr};
  parallel_planned(
      [&](int ranks) {
        plan.build(layer, batch, ranks, false);
        scratch.resize(static_cast<size_t>(ranks * attention_scratch_floats(layer)));
        partials.resize(static_cast<size_t>(plan.num_partials * attention_partial_floats(layer)));
        call.partials = partials.data();
      },
      [&](Team& team) {
        attention_run(team, plan, call, scratch.data() + team.rank() * attention_scratch_floats(layer));
      });
}

void rope_and_cache(Mat<float> qkv, Mat<uint8_t> cache, Vec<const int32_t> positions, Vec<const int32_t> slots,
                    Cube<const float> table, bool interleaved, Vec<const float> q_norm, Vec<const float> k_norm, float eps,
                    int num_heads, int num_kv_heads, int head_dim, int block_size, int kv_type) {
  const AttentionLayer layer = make_layer(kv_type, block_size, num_heads, num_kv_heads, head_dim, 1, 0, 0);
  const int64_t tokens = dim(qkv, 0);
  check_shape(qkv, tokens, int64_t{num_heads + 2 * num_kv_heads} * head_dim, "qkv");
  check_shape(cache, dim(cache, 0), layer.block_bytes(), "cache");
  check_length(positions, tokens, "positions");
  check_length(slots, tokens, "slots");
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots.data()[i] >= dim(cache, 0) * block_size) {
      refuse("slot ", slots.data()[i], " lies past the cache of ", dim(cache, 0) * block_size);
    }
    if (positions.data()[i] < 0 || (table.is_valid() && positions.data()[i] >= dim(table, 0))) {
      refuse("position ", positions.data()[i], " lies past the rotary table; positions count from 0");
    }
  }
  const int rotary_dim = check_rotary(table, head_dim);
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
  std::vector<float> memory;
  parallel_planned([&](int ranks) { memory.resize(static_cast<size_t>(ranks * floats)); },
                   [&](Team& team) { rope_run(team, call, 0, tokens, memory.data() + team.rank() * floats); });
}

void rms_norm(Mat<const float> x, Vec<const float> weight, float eps, Mat<float> out) {
  check_length(weight, dim(x, 1), "weight");
  check_shape(out, dim(x, 0), dim(x, 1), "out");
  nb::gil_scoped_release release;
  const int64_t n = static_cast<int64_t>(x.shape(1));
  parallel([&](Team& team) {
    team.for_each(static_cast<int64_t>(x.shape(0)), [&](int64_t i) {
      pick_rows().rms_norm(x.data() + i * n, weight.data(), n, eps, out.data() + i * n);
    });
  });
}

void layer_norm(Mat<const float> x, Vec<const float> weight, Vec<const float> bias, float eps, Mat<float> out) {
  check_length(weight, dim(x, 1), "weight");
  check_length(bias, dim(x, 1), "bias");
  check_shape(out, dim(x, 0), dim(x, 1), "out");
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
  constexpr int64_t kMost = int64_t{1} << 48;
  if (rows < 0 || columns < 0 || (columns > 0 && rows > kMost / columns)) {
    refuse("a cache of ", rows, " rows of ", columns, " bytes; neither may be negative, and ", kMost, " bytes is the most");
  }
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
