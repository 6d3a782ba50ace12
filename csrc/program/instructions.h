// The instructions of a program. Weights and tensors are borrowed; who records the program keeps them alive.
#pragma once

#include <memory>
#include <vector>

#include "linear/linear.h"
#include "ops/rows.h"
#include "program/program.h"

namespace pm {

constexpr int kNone = -1;  // no buffer

// out = scale * row token_id of the table.
struct EmbedSpec {
  const PackedLinear* table;
  float scale;
  int out;
};

// out = row position of the table [*, columns].
struct PositionsSpec {
  const float* table;
  int64_t columns;
  int out;
};

// out = LayerNorm(source), row by row; out may be the source.
struct LayerNormSpec {
  RowKind rows;
  int source, out;
  std::vector<float> weight, bias;
  float eps;
};

// In place.
struct ActivateSpec {
  RowKind rows;
  int buffer;
  int64_t columns;
  Activate which;
};

// One row's way from the residual stream to a matrix product: gather -> norm -> Hadamard -> floats, and / or the form
// that the product wants.
struct RowsSpec {
  RowKind rows = RowKind::tokens;
  int source = kNone;          // floats
  bool gather = false;         // row i is the step's row logits_rows[i]
  int64_t columns = 0;
  std::vector<float> norm;     // empty: none
  float eps = 0;
  int64_t hadamard = 0;        // block; 0: none
  int out = kNone;             // floats; may be the source
  bool result = false;         // floats go to the step's result, where logits go otherwise
  int act = kNone;             // prepared as `kind`
  ActKind kind = ActKind::f32;
};

struct LinearSpec {
  RowKind rows = RowKind::tokens;
  int act = kNone;
  ActKind kind = ActKind::f32;
  const PackedLinear* weight = nullptr;
  int out = kNone;  // kNone: the step's logits
  bool find_best = false;  // of the logits, as they are computed; else an instruction after this one tells
  bool accumulate = false;
  Gate gate = Gate::silu;
};

// out += scale * y.
struct AddSpec {
  RowKind rows;
  int out, y;
  int64_t columns;
  float scale;
};

struct RopeSpec {
  RopeCall call;  // qkv, positions and slots are filled in for each step
  std::vector<float> q_norm, k_norm;
  AttentionLayer layer;
  int group;
  int qkv;
};

struct AttentionSpec {
  AttentionLayer layer;
  int plan;
  const uint8_t* cache;
  int query;  // floats, the query part first
  int out;
};

// Logits in place, and the best of each row.
struct LogitsSpec {
  int64_t columns;
  float scale, softcap;
};

// Buffers named pairs_* and inner hold top_k adjacent rows for each row.
struct MoeSpec {
  RowKind rows = RowKind::tokens;
  int router = kNone;  // floats [num_experts]: the router's scores
  int act = kNone;     // rows prepared for the experts' gate_up, of `in_kind`
  int pairs_in = kNone, inner = kNone, pairs_act = kNone, pairs_out = kNone;
  int out = kNone;
  ActKind in_kind = ActKind::f32, down_kind = ActKind::f32;
  std::vector<const PackedLinear*> gate_up, down;  // per expert
  int64_t hidden = 0, intermediate = 0, top_k = 0, down_hadamard = 0;
  int64_t max_rows = 0;  // of a tile
  bool renormalize = false;
  Gate gate = Gate::silu;
};

std::unique_ptr<Instruction> make_embed(EmbedSpec spec);
std::unique_ptr<Instruction> make_positions(PositionsSpec spec);
std::unique_ptr<Instruction> make_layer_norm(LayerNormSpec spec);
std::unique_ptr<Instruction> make_activate(ActivateSpec spec);
std::unique_ptr<Instruction> make_rows(RowsSpec spec);
std::unique_ptr<Instruction> make_linear(LinearSpec spec);
std::unique_ptr<Instruction> make_add(AddSpec spec);
std::unique_ptr<Instruction> make_rope(RopeSpec spec);
std::unique_ptr<Instruction> make_attention(AttentionSpec spec);
std::unique_ptr<Instruction> make_scale_softcap(LogitsSpec spec);
std::unique_ptr<Instruction> make_moe(MoeSpec spec);

}  // namespace pm
