// pagemill._native.Program: recorded by src/pagemill/worker/graphs.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
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

constexpr int kMostGroups = 64;
constexpr int64_t kMostColumns = int64_t{1} << 24;  // of a buffer
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // of a step

// The caches of one group's layers, whose blocks are counted alike.
struct GroupCaches {
  int64_t num_blocks = 0;  // of the smallest
  int block_size = 0;      // 0: no layer is of this group
};

// A program, what its instructions point into (rotary tables, caches, experts), and what bounds a step's indices.
struct BoundProgram : Program {
  using Program::Program;
  std::vector<nb::object> kept;
  std::vector<GroupCaches> groups;
  std::map<int, ActKind> forms;  // of the rows that a buffer was declared for
  int64_t vocabulary = std::numeric_limits<int32_t>::max();     // of the smallest embedding table
  int64_t num_positions = std::numeric_limits<int32_t>::max();  // of the shortest rotary or position table
  int64_t result_width = 0;                                     // columns of the step's logits or result that are written
};

// An instruction's binding: nothing is noted of one that comes too late.
template <class Result, class... Args>
auto recording(Result (*record)(BoundProgram&, Args...)) {
  return [record](BoundProgram& p, Args... args) -> Result {
    if (p.finished()) throw std::logic_error("the program is finished; nothing can be appended");
    return record(p, std::forward<Args>(args)...);
  };
}

RowKind rows_of(bool logits) { return logits ? RowKind::logits : RowKind::tokens; }

// That an instruction over rows of a kind finds as many bytes in each row of a buffer as it will read or write.
void check_buffer(const BoundProgram& p, int buffer, RowKind rows, int64_t row_bytes, const char* name) {
  if (buffer < 0 || buffer >= p.num_buffers()) {
    refuse(name, " is buffer ", buffer, ", which was not declared; there are ", p.num_buffers());
  }
  if (p.buffer_rows(buffer) != rows) {
    const auto word = [](RowKind kind) { return kind == RowKind::logits ? "the rows with logits" : "all tokens"; };
    refuse(name, " (buffer ", buffer, ") holds ", word(p.buffer_rows(buffer)), ", but the instruction runs over ", word(rows),
           "; declare both alike");
  }
  if (p.buffer_row_bytes(buffer) < row_bytes) {
    refuse(name, " (buffer ", buffer, ") has rows of ", p.buffer_row_bytes(buffer), " bytes, but the instruction needs ",
           row_bytes, "; declare it wider");
  }
}

void check_floats(const BoundProgram& p, int buffer, RowKind rows, int64_t columns, const char* name) {
  if (columns < 1) refuse(name, " has ", columns, " columns; the least is 1");
  check_buffer(p, buffer, rows, columns * 4, name);
}

// Rows as a matrix is multiplied with: integers that were rounded for others would be summed wrongly (i8_token_pairs).
void check_act(const BoundProgram& p, int buffer, RowKind rows, const PackedLinear& weight) {
  const ActKind wanted = activation_kind(weight);
  check_buffer(p, buffer, rows, activation_row_bytes(wanted, weight.k), "act");
  const auto form = p.forms.find(buffer);
  if (form != p.forms.end() && form->second != wanted) {
    refuse("act (buffer ", buffer, ") holds rows prepared as ", act_kind_name(form->second), ", but the matrix takes ",
           act_kind_name(wanted), "; declare it for this matrix, or for one of its kind");
  }
}

// Empty where the argument was None.
std::vector<float> copy_of(const Vec<const float>& v) {
  return v.is_valid() ? std::vector<float>(v.data(), v.data() + v.shape(0)) : std::vector<float>{};
}

int floats(BoundProgram& p, int64_t columns, bool logits) {
  if (columns < 1 || columns > kMostColumns) refuse("a buffer has ", columns, " columns; it takes 1 to ", kMostColumns);
  return p.new_buffer(rows_of(logits), columns * 4);
}

int activation(BoundProgram& p, const PackedLinear& weight, bool logits) {
  const ActKind form = activation_kind(weight);
  const int buffer = p.new_buffer(rows_of(logits), activation_row_bytes(form, weight.k));
  p.forms[buffer] = form;
  return buffer;
}

void embed(BoundProgram& p, const PackedLinear& table, float scale, int out) {
  check_floats(p, out, RowKind::tokens, table.k, "out");
  p.append(make_embed({&table, scale, out}), 0);
  p.vocabulary = std::min(p.vocabulary, table.n);
}

void positions(BoundProgram& p, const Mat<const float>& table, int out) {
  check_floats(p, out, RowKind::tokens, dim(table, 1), "out");
  p.append(make_positions({table.data(), dim(table, 1), out}), 0);
  p.num_positions = std::min(p.num_positions, dim(table, 0));
  p.kept.push_back(owner_of(table));
}

void layer_norm(BoundProgram& p, int source, int out, const Vec<const float>& weight, const Vec<const float>& bias,
                float eps, bool logits) {
  check_length(bias, dim(weight, 0), "bias");
  check_floats(p, source, rows_of(logits), dim(weight, 0), "source");
  check_floats(p, out, rows_of(logits), dim(weight, 0), "out");
  p.append(make_layer_norm({rows_of(logits), source, out, copy_of(weight), copy_of(bias), eps}), 0);
}

void activate(BoundProgram& p, int buffer, int64_t columns, const std::string& name, bool logits) {
  const Activate which = activation_named(name);
  check_floats(p, buffer, rows_of(logits), columns, "buffer");
  p.append(make_activate({rows_of(logits), buffer, columns, which}), 0);
}

void rows(BoundProgram& p, int source, int64_t columns, const Vec<const float>& norm, float eps, int64_t hadamard, int out,
          int act, const PackedLinear* weight, bool gather, bool logits, bool result) {
  const RowKind kind = rows_of(logits);
  check(!result || (logits && out == kNone && act == kNone), "a result is that of the rows with logits, and only that");
  check(!gather || logits, "rows are gathered for the rows with logits; set logits=True");
  if (norm.is_valid()) check_length(norm, columns, "norm");
  check((act == kNone) == (weight == nullptr), "act and weight come together");
  if (weight && weight->k != columns) refuse("the weight takes rows of ", weight->k, " values, not of ", columns);
  check_floats(p, source, gather ? RowKind::tokens : kind, columns, "source");
  if (hadamard) check_hadamard(hadamard, columns);
  if (out != kNone) check_floats(p, out, kind, columns, "out");
  if (weight) check_act(p, act, kind, *weight);
  RowsSpec spec;
  spec.rows = kind;
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
  if (result) p.result_width = std::max(p.result_width, columns);
}

void linear(BoundProgram& p, int act, const PackedLinear& weight, int out, bool accumulate, const std::string& gate,
            bool logits, bool find_best) {
  const Gate chosen = gate_named(gate);
  check(out != kNone || logits, "only the logits are written outside the arena");
  check(!find_best || (out == kNone && !weight.gated), "the best is found among the logits");
  check(!accumulate || out != kNone, "the logits cannot be added into; accumulate into a buffer");
  check(act != out, "act and out are the same buffer; a product needs two");
  check_act(p, act, rows_of(logits), weight);
  if (out != kNone) check_floats(p, out, rows_of(logits), weight.n, "out");
  const int64_t tile = std::min(p.tile_rows(), p.max_logits());
  p.append(make_linear({rows_of(logits), act, activation_kind(weight), &weight, out, find_best, accumulate, chosen}),
           find_best ? tile * static_cast<int64_t>(sizeof(RowBest) / sizeof(float)) : 0);
  if (out == kNone) p.result_width = std::max(p.result_width, weight.n);
}

void add(BoundProgram& p, int out, int y, int64_t columns, float scale, bool logits) {
  check_floats(p, out, rows_of(logits), columns, "out");
  check_floats(p, y, rows_of(logits), columns, "y");
  p.append(make_add({rows_of(logits), out, y, columns, scale}), 0);
}

void check_cache(const BoundProgram& p, const AttentionLayer& layer, const Mat<uint8_t>& cache, int group) {
  if (group < 0 || group >= kMostGroups) refuse("group is ", group, "; it must be from 0 to ", kMostGroups - 1);
  check_shape(cache, dim(cache, 0), layer.block_bytes(), "cache");
  if (static_cast<size_t>(group) >= p.groups.size()) return;
  const int other = p.groups[static_cast<size_t>(group)].block_size;
  if (other != 0 && other != layer.block_size) {
    refuse("group ", group, " has a layer with blocks of ", other, " tokens and one of ", layer.block_size,
           "; layers of different block sizes go into different groups");
  }
}

// The cache must outlive the program, and no block may lie past any of its group.
void keep_cache(BoundProgram& p, const AttentionLayer& layer, const Mat<uint8_t>& cache, int group) {
  if (p.groups.size() <= static_cast<size_t>(group)) p.groups.resize(static_cast<size_t>(group) + 1);
  GroupCaches& caches = p.groups[static_cast<size_t>(group)];
  caches.num_blocks = caches.block_size == 0 ? dim(cache, 0) : std::min(caches.num_blocks, dim(cache, 0));
  caches.block_size = layer.block_size;
  p.kept.push_back(owner_of(cache));
}

void rope(BoundProgram& p, int qkv, const AttentionLayer& layer, const Mat<uint8_t>& cache, int group,
          const Cube<const float>& table, bool interleaved, const Vec<const float>& q_norm, const Vec<const float>& k_norm,
          float eps) {
  check_cache(p, layer, cache, group);
  check_norm(q_norm, layer.num_heads, layer.head_dim);
  check_norm(k_norm, layer.num_kv_heads, layer.head_dim);
  check_floats(p, qkv, RowKind::tokens, int64_t{layer.num_heads + 2 * layer.num_kv_heads} * layer.head_dim, "qkv");
  RopeSpec spec;
  spec.call = {};
  spec.call.cache = cache.data();
  spec.call.rotary_dim = check_rotary(table, layer.head_dim);
  spec.call.table = table.is_valid() ? table.data() : nullptr;
  spec.call.interleaved = interleaved;
  spec.call.eps = eps;
  spec.q_norm = copy_of(q_norm);
  spec.k_norm = copy_of(k_norm);
  spec.layer = layer;
  spec.group = group;
  spec.qkv = qkv;
  p.append(make_rope(std::move(spec)), rope_scratch_floats(layer));
  keep_cache(p, layer, cache, group);
  if (!table.is_valid()) return;
  p.num_positions = std::min(p.num_positions, dim(table, 0));
  p.kept.push_back(owner_of(table));
}

void attention(BoundProgram& p, int query, int out, const AttentionLayer& layer, const Mat<uint8_t>& cache, int group) {
  check_cache(p, layer, cache, group);
  check_floats(p, query, RowKind::tokens, int64_t{layer.num_heads} * layer.head_dim, "query");
  check_floats(p, out, RowKind::tokens, int64_t{layer.num_heads} * layer.head_dim, "out");
  p.append(make_attention({layer, p.plan_for(layer, group), cache.data(), query, out}), attention_scratch_floats(layer));
  keep_cache(p, layer, cache, group);
}

void scale_softcap(BoundProgram& p, int64_t columns, float scale, float softcap) {
  if (columns < 1) refuse("scale_softcap over ", columns, " columns; the least is 1");
  p.append(make_scale_softcap({columns, scale, softcap}), 0);
  p.result_width = std::max(p.result_width, columns);
}

void moe(BoundProgram& p, int router, int act, int out, nb::sequence gate_up_list, nb::sequence down_list, int64_t top_k,
         bool renormalize, int64_t down_hadamard, const std::string& gate, bool logits) {
  std::vector<nb::object> experts;
  const auto gate_up = packed_list(gate_up_list, experts), down = packed_list(down_list, experts);
  check(!gate_up.empty() && gate_up.size() == down.size(), "gate_up and down need one matrix for each expert");
  const auto num_experts = static_cast<int64_t>(gate_up.size());
  if (top_k < 1 || top_k > num_experts) refuse("top_k is ", top_k, "; it must be 1 to the ", num_experts, " experts");
  for (size_t e = 0; e < gate_up.size(); ++e) {
    check(gate_up[e]->gated && alike(*gate_up[e], *gate_up[0]) && !down[e]->gated && alike(*down[e], *down[0]) &&
              down[e]->k == gate_up[0]->n && down[e]->n == gate_up[0]->k,
          "experts differ in shape or kind, or gate_up is not packed as gated, or down is");
  }
  MoeSpec spec;
  spec.gate = gate_named(gate);
  spec.rows = rows_of(logits);
  spec.hidden = gate_up[0]->k;
  spec.intermediate = gate_up[0]->n;
  if (down_hadamard) check_hadamard(down_hadamard, spec.intermediate);
  check_floats(p, router, spec.rows, num_experts, "router");
  check_act(p, act, spec.rows, *gate_up[0]);
  check_floats(p, out, spec.rows, spec.hidden, "out");
  spec.router = router;
  spec.act = act;
  spec.out = out;
  spec.gate_up = gate_up;
  spec.down = down;
  spec.in_kind = activation_kind(*gate_up[0]);
  spec.down_kind = activation_kind(*down[0]);
  spec.top_k = top_k;
  spec.down_hadamard = down_hadamard;
  spec.max_rows = std::min(p.tile_rows(), logits ? p.max_logits() : p.max_tokens());
  spec.renormalize = renormalize;
  spec.pairs_in = p.new_buffer(spec.rows, top_k * activation_row_bytes(spec.in_kind, spec.hidden));
  spec.inner = p.new_buffer(spec.rows, top_k * spec.intermediate * 4);
  spec.pairs_act = p.new_buffer(spec.rows, top_k * activation_row_bytes(spec.down_kind, spec.intermediate));
  spec.pairs_out = p.new_buffer(spec.rows, top_k * spec.hidden * 4);
  p.append(make_moe(std::move(spec)), 0);
  p.kept.insert(p.kept.end(), experts.begin(), experts.end());
}

// Every index that an instruction follows, checked once a step: a wrong one must be an error, not a wild read.
void check_inputs(const BoundProgram& p, const ProgramInputs& in) {
  for (int64_t i = 0; i < in.num_tokens; ++i) {
    if (in.token_ids[i] < 0 || in.token_ids[i] >= p.vocabulary) {
      refuse("token id ", in.token_ids[i], " lies outside the vocabulary of ", p.vocabulary);
    }
    if (in.positions[i] < 0 || in.positions[i] >= p.num_positions) {
      refuse("position ", in.positions[i], " lies past the rotary table or position table of ", p.num_positions);
    }
  }
  for (int64_t i = 0; i < in.num_logits; ++i) {
    if (in.logits_rows[i] < 0 || in.logits_rows[i] >= in.num_tokens) {
      refuse("logits_rows names token ", in.logits_rows[i], ", which is not in the step of ", in.num_tokens);
    }
  }
  for (size_t g = 0; g < in.groups.size(); ++g) {
    const GroupCaches& caches = p.groups[g];
    if (caches.block_size == 0) continue;
    const int64_t num_slots = caches.num_blocks * caches.block_size;
    for (int64_t i = 0; i < in.num_tokens; ++i) {
      if (in.groups[g].slots[i] >= num_slots) {
        refuse("slot ", in.groups[g].slots[i], " lies past the smallest cache of group ", g, ", which has ", num_slots);
      }
    }
  }
  p.for_each_plan([&](const AttentionLayer& layer, int group) {
    const GroupInputs& tables = in.groups[static_cast<size_t>(group)];
    const AttentionBatch batch{in.num_requests, in.query_start, in.context_lens, tables.block_tables,
                               tables.table_stride};
    check_batch(layer, batch, in.num_tokens, p.groups[static_cast<size_t>(group)].num_blocks);
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
  check_length(logits_kept, in.num_logits, "logits_kept");
  check_length(best, in.num_logits, "best");
  check_length(highest, in.num_logits, "highest");
  check_length(finite, in.num_logits, "finite");
  check_length(positions, in.num_tokens, "positions");
  check_length(query_start, int64_t{in.num_requests} + 1, "query_start");
  if (dim(logits, 0) < in.num_logits || dim(logits, 1) < p.result_width) {
    refuse("logits is [", dim(logits, 0), ", ", dim(logits, 1), "], but the step writes [", in.num_logits, ", ", p.result_width, "]");
  }
  if (slot_mapping.size() != p.groups.size() || block_tables.size() != p.groups.size()) {
    refuse("slot_mapping has ", slot_mapping.size(), " entries and block_tables ", block_tables.size(),
           "; both need one for each of the ", p.groups.size(), " groups");
  }
  for (size_t g = 0; g < slot_mapping.size(); ++g) {
    check_length(slot_mapping[g], in.num_tokens, "slot_mapping of a group");
    check_length(block_tables[g], in.num_requests, "block_tables of a group");
    in.groups.push_back({slot_mapping[g].data(), block_tables[g].data(), dim(block_tables[g], 1)});
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
      .def("__init__",
           [](BoundProgram* self, int64_t max_tokens, int64_t max_logits, int64_t tile_rows) {
             for (const int64_t rows : {max_tokens, max_logits, tile_rows}) {
               if (rows < 1 || rows > kMostRows) {
                 refuse("max_tokens is ", max_tokens, ", max_logits ", max_logits, " and tile_rows ", tile_rows,
                        "; each must be from 1 to ", kMostRows);
               }
             }
             new (self) BoundProgram(max_tokens, max_logits, tile_rows);
           },
           "max_tokens"_a, "max_logits"_a, "tile_rows"_a = 256)
      .def("floats", recording(&floats), "columns"_a, "logits"_a = false)
      .def("activation", recording(&activation), "weight"_a, "logits"_a = false)
      .def("embed", recording(&embed), "table"_a, "scale"_a, "out"_a, nb::keep_alive<1, 2>())
      .def("rows", recording(&rows), "source"_a, "columns"_a, nb::kw_only(), "norm"_a = nb::none(), "eps"_a = 0.0f,
           "hadamard"_a = 0, "out"_a = kNone, "act"_a = kNone, "weight"_a = nb::none(), "gather"_a = false,
           "logits"_a = false, "result"_a = false)
      .def("positions", recording(&positions), "table"_a, "out"_a)
      .def("layer_norm", recording(&layer_norm), "source"_a, "out"_a, "weight"_a, "bias"_a, "eps"_a, "logits"_a = false)
      .def("activate", recording(&activate), "buffer"_a, "columns"_a, "name"_a, "logits"_a = false)
      .def("linear", recording(&linear), "act"_a, "weight"_a, "out"_a, nb::kw_only(), "accumulate"_a = false, "gate"_a = "silu",
           "logits"_a = false, "find_best"_a = false, nb::keep_alive<1, 3>())
      .def("add", recording(&add), "out"_a, "y"_a, "columns"_a, "scale"_a, "logits"_a = false)
      .def("rope", recording(&rope), "qkv"_a, "layer"_a, "cache"_a, "group"_a, "table"_a.none(), nb::kw_only(),
           "interleaved"_a = false, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "eps"_a = 0.0f)
      .def("attention", recording(&attention), "query"_a, "out"_a, "layer"_a, "cache"_a, "group"_a)
      .def("scale_softcap", recording(&scale_softcap), "columns"_a, "scale"_a, "softcap"_a)
      .def("moe", recording(&moe), "router"_a, "act"_a, "out"_a, "gate_up"_a, "down"_a, nb::kw_only(), "top_k"_a, "renormalize"_a,
           "down_hadamard"_a = 0, "gate"_a = "silu", "logits"_a = false)
      .def("finish", &BoundProgram::finish)
      .def("run", &run, "token_ids"_a, "positions"_a, "query_start"_a, "context_lens"_a, "slot_mapping"_a,
           "block_tables"_a, "logits_rows"_a, "logits"_a, "logits_kept"_a, "best"_a, "highest"_a, "finite"_a)
      .def("set_profiling", [](BoundProgram& p, bool on) {
             if (!p.finished()) throw std::logic_error("finish() the program before it is profiled");
             p.set_profiling(on);
           }, "on"_a)
      .def("timings", [](const BoundProgram& p) {
             std::vector<std::pair<std::string, double>> result;
             for (const auto& timing : p.timings()) result.emplace_back(timing.name, timing.seconds);
             return result;
           })
      .def_prop_ro("arena_bytes", &BoundProgram::arena_bytes)
      .def_prop_ro("num_instructions", &BoundProgram::num_instructions);
}

}  // namespace pm
