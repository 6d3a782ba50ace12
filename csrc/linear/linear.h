// Matrix products y[M, N] = x[M, K] · W[N, K]ᵀ, with weights packed once and activations prepared per call.
//
// What the caller does, inside one parallel region:
//
//   const ActKind kind = activation_kind(w);                        // what these weights want under the current set
//   Activation x = activation_at(scratch, kind, rows, w.k);         // scratch: activation_bytes(kind, rows, k) bytes
//   prepare_rows(team, x_f32, ldx, nullptr, x);                     // or fused with a norm: quantize.h, per row
//   team.barrier();
//   linear_run(team, {.x = x, .w = &w, .out = y, .ldo = n});
//   team.barrier();
//
// Exactness: a row of y depends on its row of x and on W alone, bit for bit, within one instruction set. Each output is
// summed along K in the order of the packed weights by one accumulator, in the skinny and in the wide kernels alike;
// integer sums are exact in any order.
#pragma once

#include <cstdint>

#include "core/memory.h"
#include "core/team.h"
#include "core/upcoming.h"

namespace pm {

// ---------------------------------------------------------------------------------------------- activations

enum class ActKind : uint8_t {
  f32,       // rows of float
  bf16,      // rows of bfloat16, rounded to nearest even
  i8_token,  // rows of int8 with one scale: x ~ scale * q, |q| <= 127
  i8_group,  // rows of GroupRecord: one scale per 32 values
  // The same, of coarser steps: q[2 i] + q[2 i + 1] lies within 128 of 0, too, so that neighbours' products with weights
  // of 8 unsigned bits sum up within int16. Of normal numbers a row of 576 has 29 steps to a deviation instead of 39.
  i8_token_pairs,
  i8_group_pairs,
};

constexpr int64_t kActGroup = 32;

// Head of an i8_token row; the int8 values follow at kTokenHead bytes, zeros behind them to the row's end.
struct TokenHead {
  float scale;
  int32_t sum128;  // 128 times the sum of the row's int8 values
};
constexpr int64_t kTokenHead = 64;
constexpr int64_t kMostTokenK = 65536;  // values of an i8_token row: their sums are int32

// One group of an i8_group row. The kernels start their accumulators with `offset`, which takes the weights' zero point
// out again: 8 for 4-bit integers, 16 times that for 8-bit ones.
struct GroupRecord {
  int8_t q[kActGroup];
  float scale;
  float scaled_sum;      // scale * (sum of q)
  int32_t offset;        // -8 * (sum of q)
  int32_t half_offset;   // -8 * (sum of the first 16 q)
};
static_assert(sizeof(GroupRecord) == 48);

// A view of prepared rows; owns nothing. Rows start `row_bytes` apart.
struct Activation {
  ActKind kind = ActKind::f32;
  int64_t rows = 0;
  int64_t k = 0;
  int64_t row_bytes = 0;
  std::byte* data = nullptr;

  std::byte* row(int64_t i) const { return data + i * row_bytes; }
};

// Bytes of one prepared row (a multiple of 64), and of all.
int64_t activation_row_bytes(ActKind kind, int64_t k);
inline int64_t activation_bytes(ActKind kind, int64_t rows, int64_t k) { return rows * activation_row_bytes(kind, k); }
// Lays `rows` rows over `memory`, which is 64-byte aligned and activation_bytes() long.
inline Activation activation_at(void* memory, ActKind kind, int64_t rows, int64_t k) {
  return {kind, rows, k, activation_row_bytes(kind, k), static_cast<std::byte*>(memory)};
}

// Prepares x.rows rows: row i of `x` from row (indices ? indices[i] : i) of `src` [*, k] float, `ld` floats apart. With
// `indices`, only the rows whose logits are wanted are prepared and multiplied. Rows are shared out; no barrier at
// the end.
void prepare_rows(Team& team, const float* src, int64_t ld, const int32_t* indices, const Activation& x);

// ---------------------------------------------------------------------------------------------- weights

enum class WeightKind : uint8_t {
  f32,
  bf16,
  int8,    // one scale per output; activations i8_token
  group4,  // 4-bit unsigned integers with a scale (and minimum) per group along K; activations i8_group
  group8,  // 8-bit, the same
};

// Packed weights. The layout is the same for all instruction sets (linear/pack.cpp draws it): panels of 32 outputs, each
// a run of 128-byte steps along K.
struct PackedLinear {
  WeightKind kind = WeightKind::f32;
  int64_t n = 0;         // outputs as stored by linear_run: N, or N / 2 when gated
  int64_t k = 0;
  bool gated = false;    // packed from [2F, K] = gate rows, then up rows; y[:, F] = act(gate) * up
  int64_t panels = 0;    // of 32 packed columns
  int64_t steps = 0;     // 128-byte steps of a panel (group kinds: groups of 32 along K)
  int64_t panel_bytes = 0;
  int bits = 8;          // of the integers as packed, at most: 4 of group4, 1 to 8 of group8 with minima
  int group = 0;         // group kinds: K values that share a scale: 16, 32, 64, 128, ...
  bool has_min = false;  // group kinds: w = scale * q + min; otherwise w = scale * (q - zero), zero in the integers
  int scale_shift = 0;   // group kinds: log2(group / 32), 0 for group 16
  int64_t scale_panel_halves = 0;  // group kinds: float16 values of a panel's scales (and minima)
  Buffer data;           // [panels, panel_bytes]
  Buffer scales;         // group kinds: float16 [panels, ceil(K / group), 1 + has_min, 32]
  Buffer column_scale;   // float [panels * 32]: int8: the scale; group kinds: a power of two
  Buffer bias;           // float [panels * 32], or empty

  int64_t bytes() const { return static_cast<int64_t>(data.size() + scales.size() + column_scale.size() + bias.size()); }
  const float* bias_or_null() const { return bias.size() > 0 ? bias.as<float>() : nullptr; }
};

// The form of activation that `w` is multiplied with under the current instruction set: bf16 weights take bf16 rows
// where the CPU has bf16 dot products, float rows elsewhere; integers of 8 bits take rows in pairs where it has no
// dot products of bytes (AVX2). Ask again after set_isa.
ActKind activation_kind(const PackedLinear& w);

// ---------------------------------------------------------------------------------------------- the product

enum class Gate : uint8_t { silu, gelu_tanh };

// What a rank knows of a row of logits: of the columns c with c % 16 = lane that it has computed, the highest and its
// step c / 16, the lowest of equals; and 0, or NaN once one was not finite.
struct RowBest {
  alignas(64) float value[16];
  float step[16], taint[16];
};

struct LinearArgs {
  Activation x;                     // [M, K], of activation_kind(*w)
  const PackedLinear* w = nullptr;  // its bias, if any, is added
  float* out = nullptr;             // [M, n], rows `ldo` floats apart
  int64_t ldo = 0;
  bool accumulate = false;          // add into out (the residual stream) instead of storing
  Gate gate = Gate::silu;           // when w is gated
  const PackedLinear* next = nullptr;  // the product after this one, if known: each rank fetches its first weights ahead
  RowBest* best = nullptr;             // [M] this rank's, to be updated; then neither gated nor accumulating
  const bool* kept = nullptr;          // [M] with `best`: whether the row is also stored
  Upcoming* upcoming = nullptr;        // what this rank reads of the KV cache afterwards, if known: fetched along
};

// Called by every rank of `team`, which share the work out. No barrier before or after. `x` and `out` must not
// overlap. M = 0 is allowed.
void linear_run(Team& team, const LinearArgs& args);

}  // namespace pm
