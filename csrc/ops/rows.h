// Ops that take one row (a token) at a time: norms, activations, rotary embedding with the KV write, logits epilogue.
#pragma once

#include <cstdint>

#include "core/team.h"
#include "ops/attention.h"

namespace pm {

// What rope() needs to turn tokens' fused projections into queries and cache entries. Row layout of qkv:
// [Hq * D] query, [Hkv * D] key, [Hkv * D] value.
struct RopeCall {
  const AttentionLayer* layer;
  float* qkv;  // [num_tokens][stride]; queries and keys are normed and rotated in place
  int64_t stride;
  uint8_t* cache;
  const int32_t* positions;  // [num_tokens]
  const int32_t* slots;      // [num_tokens] block_id * block_size + offset; -1: not written
  const float* table;        // [max_positions][2][rotary_dim / 2] cos, sin; null: no rotation
  int rotary_dim;
  bool interleaved;  // pairs (0, 1), (2, 3), ... instead of (i, i + rotary_dim / 2)
  const float* q_norm;  // null, [D] (each head alone) or [Hq * D] (all heads together)
  const float* k_norm;
  int q_norm_size, k_norm_size;
  float eps;
};

// Activations that stand alone; those of gated products are in the product's epilogue.
enum class Activate : uint8_t { gelu, tanh };

struct RowsTable {
  // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  // out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; out may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out);
  // x = activation(x); gelu is x / 2 (1 + erf(x / sqrt(2))).
  void (*activate)(float* x, int64_t n, Activate which);
  // out = x + scale * y; out may be x.
  void (*add)(const float* x, const float* y, float scale, int64_t n, float* out);
  // x = x * scale, then cap * tanh(x / cap) where cap > 0.
  void (*scale_softcap)(float* x, int64_t n, float scale, float cap);
  // Tokens [begin, end). Those that fill a group of the cache together are written as whole lines. `memory`:
  // rope_scratch_floats() of this thread.
  void (*rope)(const RopeCall&, int64_t begin, int64_t end, float* memory);
};
const RowsTable& pick_rows();
inline int64_t rope_scratch_floats(const AttentionLayer& layer) {
  return int64_t{kGroup} * layer.padded_dim() / 2 + layer.padded_dim();
}
// Tokens [first, first + count) on all ranks of a team.
void rope_run(Team& team, const RopeCall& call, int64_t first, int64_t count, float* memory);

}  // namespace pm
