#include "ops/rows.h"

#include <cmath>
#include <cstring>

#include "ops/attention_words.h"

namespace pm::PM_ISA {
namespace {

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  F16 s0 = zero(), s1 = zero();  // two chains; their order depends on n alone
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const F16 a = load(x + i), b = load(x + i + 16);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
  }
  for (; i < n; i += 16) {
    const F16 a = load(x + i, tail_mask(n - i));
    s0 = fma(a, a, s0);
  }
  const F16 scale = set1(1.0f / std::sqrt(hsum(add(s0, s1)) / static_cast<float>(n) + eps));
  for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  if (i < n) {
    const Mask m = tail_mask(n - i);
    store(out + i, mul(mul(load(x + i, m), scale), load(weight + i, m)), m);
  }
}

// The sum over n floats in two chains; their order depends on n alone.
template <class Term>
PM_INLINE float sum_of(const float* x, int64_t n, Term term) {
  F16 s0 = zero(), s1 = zero();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    s0 = add(s0, term(load(x + i)));
    s1 = add(s1, term(load(x + i + 16)));
  }
  for (; i < n; i += 16) s0 = add(s0, zero_unless(tail_mask(n - i), term(load(x + i, tail_mask(n - i)))));
  return hsum(add(s0, s1));
}

void layer_norm(const float* x, const float* weight, const float* bias, int64_t n, float eps, float* out) {
  const float count = static_cast<float>(n);
  const F16 mean = set1(sum_of(x, n, [](F16 v) { return v; }) / count);
  const auto square = [&](F16 v) { return mul(sub(v, mean), sub(v, mean)); };
  const F16 scale = set1(1.0f / std::sqrt(sum_of(x, n, square) / count + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const Mask m = tail_mask(n - i);
    const F16 v = mul(sub(load(x + i, m), mean), scale);
    store(out + i, fma(v, load(weight + i, m), load(bias + i, m)), m);
  }
}

// erf by Abramowitz and Stegun 7.1.26, absolute error < 2e-7 in float.
PM_INLINE F16 gelu(F16 x) {
  const F16 z = abs(mul(x, set1(0.70710678f)));
  const F16 t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
  F16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = mul(fma(p, t, set1(0.254829592f)), t);
  const F16 tail = mul(p, exp(sub(zero(), mul(z, z))));  // 1 - erf(|z|)
  const F16 both = select(greater(x, zero()), sub(set1(2.0f), tail), tail);
  return mul(mul(x, set1(0.5f)), both);
}

void activate(float* x, int64_t n, Activate which) {
  for (int64_t i = 0; i < n; i += 16) {
    const Mask m = tail_mask(n - i);
    const F16 v = load(x + i, m);
    store(x + i, which == Activate::gelu ? gelu(v) : tanh(v), m);
  }
}

void add_scaled(const float* x, const float* y, float scale, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const Mask m = tail_mask(n - i);
    store(out + i, fma(load(y + i, m), set1(scale), load(x + i, m)), m);
  }
}

void scale_softcap(float* x, int64_t n, float scale, float cap) {
  for (int64_t i = 0; i < n; i += 16) {
    const Mask m = tail_mask(n - i);
    F16 v = mul(load(x + i, m), set1(scale));
    if (cap > 0) v = mul(set1(cap), tanh(mul(v, set1(1.0f / cap))));
    store(x + i, v, m);
  }
}

void norm_heads(float* x, int heads, int dim, const float* weight, int size, float eps) {
  if (!weight) return;
  if (size == dim)
    for (int h = 0; h < heads; ++h) rms_norm(x + h * dim, weight, dim, eps, x + h * dim);
  else
    rms_norm(x, weight, int64_t{heads} * dim, eps, x);
}

void rotate_halves(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += 16) {
    const Mask m = tail_mask(half - i);
    const F16 c = load(cos + i, m), s = load(sin + i, m), a = load(x + i, m), b = load(x + half + i, m);
    store(x + i, fnma(b, s, mul(a, c)), m);
    store(x + half + i, fma(a, s, mul(b, c)), m);
  }
}

void rotate_pairs(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// A scale as bf16, rounded up so that no value lies beyond 127 steps.
uint16_t round_scale(float* scale) {
  uint32_t bits;
  std::memcpy(&bits, scale, 4);
  const bool nan = *scale != *scale;
  const uint16_t half = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0xffff) >> 16);
  bits = static_cast<uint32_t>(half) << 16;
  std::memcpy(scale, &bits, 4);
  return half;
}

// The same as write_group() in bytes; `memory`: 2 * padded_dim floats.
void write_bytes(const AttentionLayer& layer, const float* key, const float* value, uint32_t* group, int lane,
                 float* memory) {
  const int dim = layer.head_dim, steps = layer.key_steps(), padded = layer.padded_dim();
  float* turned = memory;
  std::memcpy(turned, key, sizeof(float) * dim);
  hadamard_row(turned, dim, layer.hadamard_block());
  float key_scale = byte_scale(turned, dim), value_scale = byte_scale(value, dim);
  key_scale += 0 * value_scale;  // a token that is not finite must show in its scores
  uint16_t* scales = reinterpret_cast<uint16_t*>(group + layer.scales_at());
  scales[lane] = round_scale(&key_scale);
  scales[kGroup + lane] = round_scale(&value_scale);
  auto* bytes = reinterpret_cast<int8_t*>(memory + padded);
  to_bytes(turned, dim, key_scale, bytes);
  for (int step = 0; step < steps; ++step) {
    uint32_t word;
    std::memcpy(&word, bytes + 4 * step, 4);
    group[step * kGroup + lane] = word ^ 0x80808080u;
  }
  to_bytes(value, dim, value_scale, bytes);
  auto* to = reinterpret_cast<int8_t*>(group + steps * kGroup + lane / 2 * layer.value_step_words()) + lane % 2;
  for (int d = 0; d < dim; ++d) to[2 * d] = bytes[d];
}

// One head's key and value into its lane of the cache group.
void write_group(const AttentionLayer& layer, const float* key, const float* value, uint32_t* group, int lane) {
  const int dim = layer.head_dim, steps = layer.key_steps(), padded = layer.padded_dim();
  uint32_t* values = group + steps * kGroup;
  if (layer.type == KvType::kF32) {
    for (int d = 0; d < dim; ++d) std::memcpy(group + d * kGroup + lane, key + d, 4);
    std::memcpy(values + lane * padded, value, dim * sizeof(float));
    return;
  }
  alignas(64) uint16_t k[16], v[16];
  uint16_t* halves = reinterpret_cast<uint16_t*>(values + lane / 2 * padded) + lane % 2;
  for (int d = 0; d < dim; d += 16) {
    const int n = dim - d < 16 ? dim - d : 16;
    const Mask m = tail_mask(n);
    store_bf16(k, load(key + d, m));
    store_bf16(v, load(value + d, m));
    for (int i = 0; i < (n + 1) / 2; ++i) std::memcpy(group + (d / 2 + i) * kGroup + lane, k + 2 * i, 4);
    for (int i = 0; i < n; ++i) halves[(d + i) * 2] = v[i];
  }
}

void rope(const RopeCall& call, int64_t token, float* memory) {
  const AttentionLayer& layer = *call.layer;
  const int dim = layer.head_dim, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
  float* q = call.qkv + token * call.stride;
  float* k = memory;  // the projection's keys and values stay as they are
  std::memcpy(k, q + heads * dim, sizeof(float) * kv_heads * dim);
  norm_heads(q, heads, dim, call.q_norm, call.q_norm_size, call.eps);
  norm_heads(k, kv_heads, dim, call.k_norm, call.k_norm_size, call.eps);
  if (call.table) {
    const int half = call.rotary_dim / 2;
    const float* cos = call.table + int64_t{call.positions[token]} * 2 * half;
    const auto rotate = call.interleaved ? rotate_pairs : rotate_halves;
    for (int h = 0; h < heads; ++h) rotate(q + h * dim, cos, cos + half, half);
    for (int h = 0; h < kv_heads; ++h) rotate(k + h * dim, cos, cos + half, half);
  }
  const int32_t slot = call.slots[token];
  if (slot < 0) return;
  const float* v = q + (heads + kv_heads) * dim;
  const int block_size = layer.block_size, offset = slot % block_size;
  uint32_t* block = reinterpret_cast<uint32_t*>(call.cache + slot / block_size * layer.block_bytes());
  for (int h = 0; h < kv_heads; ++h) {
    uint32_t* group = block + h * layer.head_words() + offset / kGroup * layer.group_words();
    if (layer.bytes())
      write_bytes(layer, k + h * dim, v + h * dim, group, offset % kGroup, memory + kv_heads * dim);
    else
      write_group(layer, k + h * dim, v + h * dim, group, offset % kGroup);
  }
}

}  // namespace

extern const RowsTable rows_table;
const RowsTable rows_table = {rms_norm, layer_norm, activate, add_scaled, scale_softcap, rope};

}  // namespace pm::PM_ISA
