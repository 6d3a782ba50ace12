#include "ops/rows.h"

#include <cmath>
#include <cstring>

#include "ops/attention_words.h"

namespace pm::PM_ISA {
namespace {

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  F32x16 s0 = zero(), s1 = zero();  // two chains; their order depends on n alone
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const F32x16 a = load(x + i), b = load(x + i + 16);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
  }
  for (; i < n; i += 16) {
    const F32x16 a = load(x + i, tail_mask(n - i));
    s0 = fma(a, a, s0);
  }
  const F32x16 scale = set1(1.0f / std::sqrt(hsum(add(s0, s1)) / static_cast<float>(n) + eps));
  for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  if (i < n) {
    const Mask m = tail_mask(n - i);
    store(out + i, mul(mul(load(x + i, m), scale), load(weight + i, m)), m);
  }
}

// The sum over n floats in two chains; their order depends on n alone.
template <class Term>
PM_INLINE float sum_of(const float* x, int64_t n, Term term) {
  F32x16 s0 = zero(), s1 = zero();
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
  const F32x16 mean = set1(sum_of(x, n, [](F32x16 v) { return v; }) / count);
  const auto square = [&](F32x16 v) { return mul(sub(v, mean), sub(v, mean)); };
  const F32x16 scale = set1(1.0f / std::sqrt(sum_of(x, n, square) / count + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const Mask m = tail_mask(n - i);
    const F32x16 v = mul(sub(load(x + i, m), mean), scale);
    store(out + i, fma(v, load(weight + i, m), load(bias + i, m)), m);
  }
}

// erf by Abramowitz and Stegun 7.1.26, absolute error < 2e-7 in float.
PM_INLINE F32x16 gelu(F32x16 x) {
  const F32x16 z = abs(mul(x, set1(0.70710678f)));
  const F32x16 t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
  F32x16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = mul(fma(p, t, set1(0.254829592f)), t);
  const F32x16 tail = mul(p, exp(sub(zero(), mul(z, z))));  // 1 - erf(|z|)
  const F32x16 both = select(greater(x, zero()), sub(set1(2.0f), tail), tail);
  return mul(mul(x, set1(0.5f)), both);
}

void activate(float* x, int64_t n, Activate which) {
  for (int64_t i = 0; i < n; i += 16) {
    const Mask m = tail_mask(n - i);
    const F32x16 v = load(x + i, m);
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
    F32x16 v = mul(load(x + i, m), set1(scale));
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
    const F32x16 c = load(cos + i, m), s = load(sin + i, m), a = load(x + i, m), b = load(x + half + i, m);
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

// A KV head's keys and values of consecutive tokens of one group, the first in `lane`, their rows `stride` floats apart.
struct HeadRun {
  const float *keys, *values;  // of the first token
  int64_t stride;
  uint32_t* group;
  int lane, count;
  float* memory;  // rope_scratch_floats()
};

// words [count][stride], the keys of a run, into their lanes.
void scatter_keys(const AttentionLayer& layer, const HeadRun& run, const uint32_t* words, int64_t stride) {
  const int steps = layer.key_steps();
  int step = 0;
  if (run.count == kGroup)
    for (; step + 16 <= steps; step += 16) transpose_words(words + step, stride, run.group + step * kGroup);
  for (int i = 0; i < run.count; ++i)
    for (int s = step; s < steps; ++s) run.group[s * kGroup + run.lane + i] = words[i * stride + s];
}

void write_floats(const AttentionLayer& layer, const HeadRun& run) {
  scatter_keys(layer, run, reinterpret_cast<const uint32_t*>(run.keys), run.stride);
  auto* values = reinterpret_cast<float*>(run.group + layer.key_steps() * kGroup);
  for (int i = 0; i < run.count; ++i)
    std::memcpy(values + (run.lane + i) * layer.padded_dim(), run.values + i * run.stride,
                sizeof(float) * static_cast<size_t>(layer.head_dim));
}

// Values of a run: pairs of tokens as words where both are there, else the halves alone. A neighbouring run's thread may
// write the other half at the same time.
template <class Pair, class Single>
void write_pairs(const HeadRun& run, Pair pair, Single single) {
  int i = 0;
  if (run.lane % 2) single(run.lane, i++);
  for (; i + 2 <= run.count; i += 2) pair(run.lane + i, i);
  if (i < run.count) single(run.lane + i, i);
}

void write_bf16(const AttentionLayer& layer, const HeadRun& run) {
  const int dim = layer.head_dim, steps = layer.key_steps(), padded = layer.padded_dim();
  auto* halves = reinterpret_cast<uint16_t*>(run.memory);  // [count][padded]
  for (int i = 0; i < run.count; ++i)
    for (int d = 0; d < dim; d += 16)
      store_bf16(halves + i * padded + d, load(run.keys + i * run.stride + d, tail_mask(dim - d)));
  scatter_keys(layer, run, reinterpret_cast<const uint32_t*>(halves), padded / 2);
  uint32_t* values = run.group + steps * kGroup;
  write_pairs(
      run,
      [&](int lane, int i) {
        const float *a = run.values + i * run.stride, *b = a + run.stride;
        uint32_t* to = values + lane / 2 * padded;
        for (int d = 0; d < dim; d += 16) {
          const Mask m = tail_mask(dim - d);
          store_words(to + d, pair_bf16(load(a + d, m), load(b + d, m)));
        }
      },
      [&](int lane, int i) {
        auto* to = reinterpret_cast<uint16_t*>(values + lane / 2 * padded) + lane % 2;
        alignas(64) uint16_t v[16];
        for (int d = 0; d < dim; d += 16) {
          store_bf16(v, load(run.values + i * run.stride + d, tail_mask(dim - d)));
          for (int j = 0; j < 16 && d + j < dim; ++j) to[2 * (d + j)] = v[j];
        }
      });
}

void write_bytes(const AttentionLayer& layer, const HeadRun& run) {
  const int dim = layer.head_dim, steps = layer.key_steps(), padded = layer.padded_dim();
  auto* bytes = reinterpret_cast<int8_t*>(run.memory);  // [count][padded]
  float* turned = run.memory + kGroup * padded / 4;
  auto* scales = reinterpret_cast<uint16_t*>(run.group + layer.scales_at());
  float inverse[kGroup];  // of the values
  for (int i = 0; i < run.count; ++i) {
    const float scale = byte_scale(run.values + i * run.stride, dim);
    const uint16_t rounded = round_scale(scale);
    const Bytes key = turned_to_bytes(layer, run.keys + i * run.stride, true, bytes + i * padded, turned);
    scales[run.lane + i] = round_scale(key.scale + 0 * scale);  // a value that is not finite must show in the scores
    scales[kGroup + run.lane + i] = rounded;
    inverse[i] = 1.0f / widen(rounded);
  }
  auto* words = reinterpret_cast<uint32_t*>(bytes);
  for (int i = 0; i < run.count * padded / 4; ++i) words[i] ^= 0x80808080u;
  scatter_keys(layer, run, words, padded / 4);
  auto* values = reinterpret_cast<int8_t*>(run.group + steps * kGroup);  // [value_steps][padded][2]
  const auto value = [&](int i, int d) {
    return round_i32(mul(load(run.values + i * run.stride + d, tail_mask(dim - d)), set1(inverse[i])));
  };
  write_pairs(
      run,
      [&](int lane, int i) {
        int8_t* to = values + lane * padded;
        for (int d = 0; d < dim; d += 16) store_i16(to + 2 * d, pair_bytes(value(i, d), value(i + 1, d)));
      },
      [&](int lane, int i) {
        int8_t* to = values + lane / 2 * 2 * padded + lane % 2;
        int8_t v[16];
        for (int d = 0; d < dim; d += 16) {
          store_i8(v, value(i, d));
          for (int j = 0; j < 16 && d + j < dim; ++j) to[2 * (d + j)] = v[j];
        }
      });
}

uint32_t* group_of(const RopeCall& call, int32_t slot) {
  const AttentionLayer& layer = *call.layer;
  uint8_t* block = call.cache + slot / layer.block_size * layer.block_bytes();
  return reinterpret_cast<uint32_t*>(block) + slot % layer.block_size / kGroup * layer.group_words();
}

// The lines that a single token's entry touches: one word in each of many, none of them in a cache.
void fetch_lines(const RopeCall& call, int32_t slot) {
  const AttentionLayer& layer = *call.layer;
  const uint32_t* group = group_of(call, slot);
  const int lane = slot % kGroup, pair = layer.type == KvType::kF32 ? lane : lane / 2;
  for (int h = 0; h < layer.num_kv_heads; ++h, group += layer.head_words()) {
    for (int step = 0; step < layer.key_steps(); ++step) prefetch_second_level(group + step * kGroup);
    const uint32_t* values = group + layer.key_steps() * kGroup + pair * layer.value_step_words();
    for (int w = 0; w < layer.value_step_words(); w += 16) prefetch_second_level(values + w);
    if (layer.bytes()) prefetch_second_level(group + layer.scales_at());
  }
}

void rotate_row(const RopeCall& call, int64_t token) {
  const AttentionLayer& layer = *call.layer;
  const int dim = layer.head_dim, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
  float* q = call.qkv + token * call.stride;
  norm_heads(q, heads, dim, call.q_norm, call.q_norm_size, call.eps);
  norm_heads(q + heads * dim, kv_heads, dim, call.k_norm, call.k_norm_size, call.eps);
  if (!call.table) return;
  const int half = call.rotary_dim / 2;
  const float* cos = call.table + int64_t{call.positions[token]} * 2 * half;
  const auto rotate = call.interleaved ? rotate_pairs : rotate_halves;
  for (int h = 0; h < heads + kv_heads; ++h) rotate(q + h * dim, cos, cos + half, half);
}

void rope(const RopeCall& call, int64_t begin, int64_t end, float* memory) {
  const AttentionLayer& layer = *call.layer;
  const int dim = layer.head_dim, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
  const auto write = layer.bytes() ? write_bytes : layer.type == KvType::kBf16 ? write_bf16 : write_floats;
  for (int64_t token = begin; token < end;) {
    const int32_t slot = call.slots[token];
    int count = 1;
    while (token + count < end && slot >= 0 && call.slots[token + count] == slot + count && (slot + count) % kGroup)
      ++count;
    if (const int64_t next = token + count; next < end && call.slots[next] >= 0) fetch_lines(call, call.slots[next]);
    for (int i = 0; i < count; ++i) rotate_row(call, token + i);
    if (slot >= 0) {
      const float* keys = call.qkv + token * call.stride + heads * dim;
      uint32_t* group = group_of(call, slot);
      for (int h = 0; h < kv_heads; ++h)
        write(layer, {keys + h * dim, keys + (kv_heads + h) * dim, call.stride, group + h * layer.head_words(),
                      slot % kGroup, count, memory});
    }
    token += count;
  }
}

}  // namespace

extern const RowsTable rows_table;
const RowsTable rows_table = {rms_norm, layer_norm, activate, add_scaled, scale_softcap, rope};

}  // namespace pm::PM_ISA
