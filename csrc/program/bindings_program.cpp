// pagemill._native.Program: recorded by src/pagemill/worker/graphs.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "linear/bindings_shared.h"
#include "ops/bindings_shared.h"
#include "program/instructions.h"

namespace nb = nanobind;

namespace pm {
namespace {

// A program and what its instructions point into: weights, rotary tables, caches.
struct BoundProgram : Program {
  using Program::Program;
  std::vector<nb::object> kept;
  std::vector<int64_t> num_blocks;    // of each group's caches
  std::vector<int64_t> max_position;  // of each rotary table
  int64_t vocabulary = 0;
  int block_size = 0;
};

// Empty where the argument was None.
std::vector<float> copy_of(const Vec<const float>& v) {
  return v.is_valid() ? std::vector<float>(v.data(), v.data() + v.shape(0)) : std::vector<float>{};
}

int floats(BoundProgram& p, int64_t columns, bool logits) {
  check(columns > 0, "a buffer needs at least one column");
  return p.new_buffer(logits ? RowKind::logits : RowKind::tokens, columns * 4);
}

int activation(BoundProgram& p, const PackedLinear& weight, bool logits) {
  return p.new_buffer(logits ? RowKind::logits : RowKind::tokens,
                      activation_row_bytes(activation_kind(weight), weight.k));
}

void embed(BoundProgram& p, const PackedLinear& table, float scale, int out) {
  p.vocabulary = table.n;
  p.append(make_embed({&table, scale, out}), 0);
}

void positions(BoundProgram& p, const Mat<const float>& table, int out) {
  p.max_position.push_back(static_cast<int64_t>(table.shape(0)));
  p.kept.push_back(owner_of(table));
  p.append(make_positions({table.data(), static_cast<int64_t>(table.shape(1)), out}), 0);
}

void layer_norm(BoundProgram& p, int source, int out, const Vec<const float>& weight, const Vec<const float>& bias,
                float eps, bool logits) {
  check(weight.shape(0) == bias.shape(0), "the norm's weight and bias differ in length");
  p.append(make_layer_norm({logits ? RowKind::logits : RowKind::tokens, source, out, copy_of(weight), copy_of(bias), eps}),
           0);
}

void activate(BoundProgram& p, int buffer, int64_t columns, const std::string& name, bool logits) {
  p.append(make_activate({logits ? RowKind::logits : RowKind::tokens, buffer, columns, activation_named(name)}), 0);
}

void rows(BoundProgram& p, int source, int64_t columns, const Vec<const float>& norm, float eps, int64_t hadamard, int out,
          int act, const PackedLinear* weight, bool gather, bool logits, bool result) {
  check(!result || (logits && out == kNone && act == kNone), "a result is that of the rows with logits, and only that");
  check(!norm.is_valid() || dim(norm, 0) == columns, "the norm's weight has another length than the rows");
  check((act == kNone) == (weight == nullptr), "act and weight come together");
  check(!weight || weight->k == columns, "the weight takes rows of another length");
  RowsSpec spec;
  spec.rows = logits ? RowKind::logits : RowKind::tokens;
  spec.source = source;
  spec.gather = gather;
  spec.columns = columns;
  spec.norm = copy_of(norm);
  spec.eps = eps;
  spec.hadamard = hadamard;
  spec.out = out;
  spec.result = result;
  spec.act = act;
  if (weight) spec.kind = activation_kind(*weight);
  p.append(make_rows(std::move(spec)), columns);
}

void linear(BoundProgram& p, int act, const PackedLinear& weight, int out, bool accumulate, const std::string& gate,
            bool logits, bool find_best) {
  check(out != kNone || logits, "only the logits are written outside the arena");
  check(!find_best || (out == kNone && !weight.gated), "the best is found among the logits");
  const int64_t tile = std::min(p.tile_rows(), p.max_logits());
  p.append(make_linear({logits ? RowKind::logits : RowKind::tokens, act, activation_kind(weight), &weight, out,
                        find_best, accumulate, gate_named(gate)}),
           find_best ? tile * static_cast<int64_t>(sizeof(RowBest) / sizeof(float)) : 0);
}

void add(BoundProgram& p, int out, int y, int64_t columns, float scale, bool logits) {
  p.append(make_add({logits ? RowKind::logits : RowKind::tokens, out, y, columns, scale}), 0);
}

struct LayerArgs {
  AttentionLayer layer;
  Mat<uint8_t> cache;
  int group;
};

// The cache must outlive the program; blocks of one group are counted alike in all its layers.
void keep_cache(BoundProgram& p, const LayerArgs& args) {
  check(args.group >= 0 && args.group < 64, "group must be between 0 and 63");
  check(args.cache.shape(1) == static_cast<size_t>(args.layer.block_bytes()),
        "cache must be [num_blocks, kv_block_bytes()]");
  const auto group = static_cast<size_t>(args.group);
  if (p.num_blocks.size() <= group) p.num_blocks.resize(group + 1, 0);
  p.num_blocks[group] = static_cast<int64_t>(args.cache.shape(0));
  p.block_size = args.layer.block_size;
  p.kept.push_back(owner_of(args.cache));
}

void rope(BoundProgram& p, int qkv, const AttentionLayer& layer, const Mat<uint8_t>& cache, int group,
          const Cube<const float>& table, bool interleaved, const Vec<const float>& q_norm,
          const Vec<const float>& k_norm, float eps) {
  keep_cache(p, {layer, cache, group});
  const int rotary_dim = table.is_valid() ? 2 * static_cast<int>(table.shape(2)) : 0;
  check(rotary_dim <= layer.head_dim, "the rotary table is wider than head_dim");
  RopeSpec spec;
  spec.call = {};
  spec.call.cache = cache.data();
  if (table.is_valid()) {
    spec.call.table = table.data();
    p.max_position.push_back(dim(table, 0));
    p.kept.push_back(owner_of(table));
  }
  spec.call.rotary_dim = rotary_dim;
  spec.call.interleaved = interleaved;
  spec.call.eps = eps;
  spec.q_norm = copy_of(q_norm);
  spec.k_norm = copy_of(k_norm);
  check_norm(q_norm, layer.num_heads, layer.head_dim);
  check_norm(k_norm, layer.num_kv_heads, layer.head_dim);
  spec.layer = layer;
  spec.group = group;
  spec.qkv = qkv;
  p.append(make_rope(std::move(spec)), rope_scratch_floats(layer));
}

void attention(BoundProgram& p, int query, int out, const AttentionLayer& layer, const Mat<uint8_t>& cache, int group) {
  keep_cache(p, {layer, cache, group});
  const int plan = p.plan_for(layer, group);
  p.append(make_attention({layer, plan, cache.data(), query, out}), attention_scratch_floats(layer));
}

void moe(BoundProgram& p, int router, int act, int out, const std::vector<const PackedLinear*>& gate_up,
         const std::vector<const PackedLinear*>& down, int64_t top_k, bool renormalize, int64_t down_hadamard,
         const std::string& gate, bool logits) {
  check(!gate_up.empty() && gate_up.size() == down.size(), "gate_up and down need one matrix for each expert");
  check(top_k >= 1 && top_k <= static_cast<int64_t>(gate_up.size()), "top_k must be 1 to the number of experts");
  for (size_t e = 0; e < gate_up.size(); ++e) {
    check(gate_up[e]->gated && gate_up[e]->k == gate_up[0]->k && gate_up[e]->n == gate_up[0]->n &&
              gate_up[e]->kind == gate_up[0]->kind && down[e]->k == gate_up[0]->n && down[e]->n == gate_up[0]->k &&
              down[e]->kind == down[0]->kind,
          "experts differ in shape or kind, or gate_up is not packed as gated");
  }
  MoeSpec spec;
  spec.rows = logits ? RowKind::logits : RowKind::tokens;
  spec.router = router;
  spec.act = act;
  spec.out = out;
  spec.gate_up = gate_up;
  spec.down = down;
  spec.in_kind = activation_kind(*gate_up[0]);
  spec.down_kind = activation_kind(*down[0]);
  spec.hidden = gate_up[0]->k;
  spec.intermediate = gate_up[0]->n;
  spec.top_k = top_k;
  spec.down_hadamard = down_hadamard;
  spec.max_rows = std::min(p.tile_rows(), logits ? p.max_logits() : p.max_tokens());
  spec.renormalize = renormalize;
  spec.gate = gate_named(gate);
  spec.pairs_in = p.new_buffer(spec.rows, top_k * activation_row_bytes(spec.in_kind, spec.hidden));
  spec.inner = p.new_buffer(spec.rows, top_k * spec.intermediate * 4);
  spec.pairs_act = p.new_buffer(spec.rows, top_k * activation_row_bytes(spec.down_kind, spec.intermediate));
  spec.pairs_out = p.new_buffer(spec.rows, top_k * spec.hidden * 4);
  p.append(make_moe(std::move(spec)), 0);
}

// Every index that an instruction follows, checked once a step: a wrong one must be an error, not a wild read.
void check_inputs(const BoundProgram& p, const ProgramInputs& in) {
  for (int64_t i = 0; i < in.num_tokens; ++i) {
    check(in.token_ids[i] >= 0 && in.token_ids[i] < p.vocabulary, "a token id lies outside the vocabulary");
    check(in.positions[i] >= 0, "a position is negative");
    for (const int64_t most : p.max_position) check(in.positions[i] < most, "a position lies past the rotary table");
  }
  for (int64_t i = 0; i < in.num_logits; ++i) {
    check(in.logits_rows[i] >= 0 && in.logits_rows[i] < in.num_tokens,
          "logits_rows names a token that is not in the step");
  }
  for (size_t g = 0; g < in.groups.size(); ++g) {
    for (int64_t i = 0; i < in.num_tokens; ++i) {
      check(in.groups[g].slots[i] < p.num_blocks[g] * p.block_size, "a slot lies past the cache");
    }
  }
  p.for_each_plan([&](const AttentionLayer& layer, int group) {
    const GroupInputs& tables = in.groups[static_cast<size_t>(group)];
    const AttentionBatch batch{in.num_requests, in.query_start, in.context_lens, tables.block_tables,
                               tables.table_stride};
    check_batch(layer, batch, in.num_tokens, p.num_blocks[static_cast<size_t>(group)]);
  });
}

void run(BoundProgram& p, Vec<const int32_t> token_ids, Vec<const int32_t> positions, Vec<const int32_t> query_start,
         Vec<const int32_t> context_lens, nb::sequence slots_by_group, nb::sequence tables_by_group,
         Vec<const int32_t> logits_rows, Rows2d<float> logits, Vec<const bool> logits_kept, Vec<int64_t> best,
         Vec<float> highest, Vec<bool> finite) {
  const auto slot_mapping = array_list<Vec<const int32_t>>(slots_by_group);
  const auto block_tables = array_list<Mat<const int32_t>>(tables_by_group);
  ProgramInputs in;
  in.num_tokens = static_cast<int64_t>(token_ids.shape(0));
  in.num_requests = static_cast<int>(context_lens.shape(0));
  in.num_logits = static_cast<int64_t>(logits_rows.shape(0));
  in.token_ids = token_ids.data();
  in.positions = positions.data();
  in.query_start = query_start.data();
  in.context_lens = context_lens.data();
  in.logits_rows = logits_rows.data();
  in.logits = logits.data();
  in.logits_stride = row_stride(logits, "logits");
  in.logits_kept = logits_kept.data();
  in.best = best.data();
  in.highest = highest.data();
  in.finite = finite.data();
  const size_t rows = logits_rows.shape(0);
  check(logits_kept.shape(0) == rows && best.shape(0) == rows && highest.shape(0) == rows && finite.shape(0) == rows,
        "logits_kept, best, highest and finite must be as long as logits_rows");
  check(positions.shape(0) == token_ids.shape(0), "positions and token_ids differ in length");
  check(query_start.shape(0) == context_lens.shape(0) + 1, "query_start needs one entry more than context_lens");
  check(logits.shape(0) >= logits_rows.shape(0), "logits has fewer rows than logits_rows");
  check(slot_mapping.size() == p.num_blocks.size() && block_tables.size() == p.num_blocks.size(),
        "slot_mapping and block_tables need one entry for each group");
  for (size_t g = 0; g < slot_mapping.size(); ++g) {
    check(slot_mapping[g].shape(0) == token_ids.shape(0), "slot_mapping and token_ids differ in length");
    check(block_tables[g].shape(0) == context_lens.shape(0), "block_tables needs one row for each request");
    const auto stride = static_cast<int64_t>(block_tables[g].shape(1));
    in.groups.push_back({slot_mapping[g].data(), block_tables[g].data(), stride});
  }
  check_inputs(p, in);
  nb::gil_scoped_release release;
  p.run(in);
}

}  // namespace

void register_program(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def("__init__",
           [](AttentionLayer* self, int kv_type, int block_size, int num_heads, int num_kv_heads, int head_dim,
              float scale, int window, float softcap, bool causal) {
             new (self) AttentionLayer(
                 make_layer(kv_type, block_size, num_heads, num_kv_heads, head_dim, scale, window, softcap, causal));
           },
           nb::kw_only(), "kv_type"_a, "block_size"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a,
           "window"_a = 0, "softcap"_a = 0.0f, "causal"_a = true)
      .def_prop_ro("block_bytes", &AttentionLayer::block_bytes);

  nb::class_<BoundProgram>(m, "Program")
      .def(nb::init<int64_t, int64_t, int64_t>(), "max_tokens"_a, "max_logits"_a, "tile_rows"_a = 256)
      .def("floats", &floats, "columns"_a, "logits"_a = false)
      .def("activation", &activation, "weight"_a, "logits"_a = false)
      .def("embed", &embed, "table"_a, "scale"_a, "out"_a, nb::keep_alive<1, 2>())
      .def("rows", &rows, "source"_a, "columns"_a, nb::kw_only(), "norm"_a = nb::none(), "eps"_a = 0.0f,
           "hadamard"_a = 0, "out"_a = kNone, "act"_a = kNone, "weight"_a = nb::none(), "gather"_a = false,
           "logits"_a = false, "result"_a = false)
      .def("positions", &positions, "table"_a, "out"_a)
      .def("layer_norm", &layer_norm, "source"_a, "out"_a, "weight"_a, "bias"_a, "eps"_a, "logits"_a = false)
      .def("activate", &activate, "buffer"_a, "columns"_a, "name"_a, "logits"_a = false)
      .def("linear", &linear, "act"_a, "weight"_a, "out"_a, nb::kw_only(), "accumulate"_a = false, "gate"_a = "silu",
           "logits"_a = false, "find_best"_a = false, nb::keep_alive<1, 3>())
      .def("add", &add, "out"_a, "y"_a, "columns"_a, "scale"_a, "logits"_a = false)
      .def("rope", &rope, "qkv"_a, "layer"_a, "cache"_a, "group"_a, "table"_a.none(), nb::kw_only(),
           "interleaved"_a = false, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "eps"_a = 0.0f)
      .def("attention", &attention, "query"_a, "out"_a, "layer"_a, "cache"_a, "group"_a)
      .def("scale_softcap", [](BoundProgram& p, int64_t columns, float scale, float softcap) {
             p.append(make_scale_softcap({columns, scale, softcap}), 0);
           }, "columns"_a, "scale"_a, "softcap"_a)
      .def("moe", &moe, "router"_a, "act"_a, "out"_a, "gate_up"_a, "down"_a, nb::kw_only(), "top_k"_a, "renormalize"_a,
           "down_hadamard"_a = 0, "gate"_a = "silu", "logits"_a = false, nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("finish", &BoundProgram::finish)
      .def("run", &run, "token_ids"_a, "positions"_a, "query_start"_a, "context_lens"_a, "slot_mapping"_a,
           "block_tables"_a, "logits_rows"_a, "logits"_a, "logits_kept"_a, "best"_a, "highest"_a, "finite"_a)
      .def("set_profiling", &BoundProgram::set_profiling, "on"_a)
      .def("timings", [](const BoundProgram& p) {
             std::vector<std::pair<std::string, double>> result;
             for (const auto& timing : p.timings()) result.emplace_back(timing.name, timing.seconds);
             return result;
           })
      .def_prop_ro("arena_bytes", &BoundProgram::arena_bytes)
      .def_prop_ro("num_instructions", &BoundProgram::num_instructions);
}

}  // namespace pm
