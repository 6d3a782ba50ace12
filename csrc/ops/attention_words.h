// What the attention main loops do differently for each type of cached keys and values. Read by *.isa.cpp files alone.
//
// A "word" type stands for 32 bits of a query row; Kind<Word> says what its products are summed in and which words the
// probabilities become. Eight-bit keys meet eight-bit queries; eight-bit values meet probabilities of 16 bits, which
// are already multiplied with each value's scale. All sums are then integers: exact in any order.
#pragma once

#include <cstring>
#include <type_traits>

#include "isa/lanes_math.h"
#include "linear/quantize.h"
#include "ops/attention.h"

namespace pm::PM_ISA {

constexpr float kMaxByte = 127.0f;
constexpr float kMaxProbability = 32767.0f;

template <class Word>
struct Kind {  // bfloat16 and float32
  using Sum = F32x16;
  using Probability = Word;
  static constexpr bool kBytes = false;
  static constexpr int kValueSteps = std::is_same<Word, F32Word>::value ? kGroup : kGroup / 2;
  PM_INLINE Sum first_sum(const int32_t*) { return zero(); }
  PM_INLINE W16 values(const uint32_t* p) { return load_words(p); }
  PM_INLINE F32x16 key_scales(const uint32_t*) { return zero(); }
  PM_INLINE F32x16 scores(Sum sum, F32x16) { return sum; }
  PM_INLINE F32x16 outputs(Sum sum, float) { return sum; }
};

template <>
struct Kind<I8Word> {
  using Sum = I32x16;
  using Probability = I16Word;
  static constexpr bool kBytes = true;
  static constexpr int kValueSteps = kGroup / 2;
  PM_INLINE Sum first_sum(const int32_t* start) { return set1_i32(*start); }
  PM_INLINE W16 values(const uint32_t* p) { return load_byte_pairs(p); }
  // Of the group's 16 keys.
  PM_INLINE F32x16 key_scales(const uint32_t* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }
  PM_INLINE F32x16 scores(Sum sum, F32x16 scales) { return mul(to_float(sum), scales); }
  PM_INLINE F32x16 outputs(Sum sum, float unit) { return mul(to_float(sum), set1(unit)); }
};

// The step of x [dim] in bytes: its largest magnitude / 127, never 0; NaN where x holds NaN or infinity.
PM_INLINE float byte_scale(const float* x, int dim) {
  F32x16 top = zero(), poison = zero();
  for (int d = 0; d < dim; d += 16) {
    const F32x16 v = load(x + d, tail_mask(dim - d));
    top = max(top, abs(v));
    poison = fma(v, zero(), poison);
  }
  const float scale = hmax(top) / kMaxByte + hsum(poison);
  return scale < 1e-30f ? 1e-30f : scale;
}

// A scale as bf16, rounded up so that no value lies beyond 127 steps.
PM_INLINE uint16_t round_scale(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  return scale != scale ? 0x7fc0 : static_cast<uint16_t>((bits + 0xffff) >> 16);
}
PM_INLINE float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A head of 16 N dimensions through the Hadamard transform, in registers, without its factor.
template <int N>
PM_INLINE void turn_head(const float* x, F32x16 (&v)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = turn_lanes(load(x + 16 * i));
#pragma GCC unroll 16
  for (int half = 1; half < N; half *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      if (i & half) continue;
      const F32x16 a = v[i], b = v[i + half];
      v[i] = add(a, b);
      v[i + half] = sub(a, b);
    }
  }
}

struct Bytes {
  float scale;
  int32_t sum;  // of the bytes
};

// As turned_to_bytes(), for 16 N = dim = the transform's block, of M heads side by side: one alone is a long chain of
// instructions that wait for each other.
template <int N, int M>
PM_INLINE void turned_registers(const float* const (&x)[M], bool narrow, int8_t* const (&q)[M], Bytes (&out)[M]) {
  F32x16 v[M][N], top[M];
  const auto each = [&](auto body) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) body(m);
  };
  each([&](int m) __attribute__((always_inline)) { turn_head<N>(x[m], v[m]); });
  each([&](int m) __attribute__((always_inline)) {
    top[m] = abs(v[m][0]);  // what is not finite is in every lane by now
#pragma GCC unroll 16
    for (int i = 1; i < N; ++i) top[m] = max(top[m], abs(v[m][i]));
  });
  constexpr float kFactor = N == 4 ? 0.125f : 0.08838834764831845f;  // 1 / sqrt(dim)
  each([&](int m) __attribute__((always_inline)) {
    const float scale = hmax(top[m]) * (kFactor / kMaxByte);
    out[m].scale = (scale < 1e-30f ? 1e-30f : scale) + 0 * scale;
    if (narrow) out[m].scale = widen(round_scale(out[m].scale));
  });
  each([&](int m) __attribute__((always_inline)) {
    const F32x16 inverse = set1(kFactor / out[m].scale);
    I32x16 sum = set1_i32(0);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const I32x16 b = round_i32(mul(v[m][i], inverse));
      sum = add(sum, b);
      store_i8(q[m] + 16 * i, b);
    }
    out[m].sum = hsum_i32(sum);
  });
}

// A key or query head through the Hadamard transform in steps of a scale -> q [padded_dim], zeros behind. narrow: the
// scale is one of bf16. memory: padded_dim floats.
PM_INLINE Bytes turned_to_bytes(const AttentionLayer& layer, const float* x, bool narrow, int8_t* q, float* memory) {
  const int dim = layer.head_dim;
  if (dim == 64 || dim == 128) {
    Bytes found[1];
    dim == 64 ? turned_registers<4, 1>({x}, narrow, {q}, found) : turned_registers<8, 1>({x}, narrow, {q}, found);
    return found[0];
  }
  std::memcpy(memory, x, sizeof(float) * dim);
  hadamard_row(memory, dim, layer.hadamard_block());
  float scale = byte_scale(memory, dim);
  if (narrow) scale = widen(round_scale(scale));
  const F32x16 inverse = set1(1.0f / scale);
  I32x16 sum = set1_i32(0);
  for (int d = 0; d < dim; d += 16) {
    const I32x16 b = round_i32(mul(load(memory + d, tail_mask(dim - d)), inverse));
    sum = add(sum, b);
    store_i8(q + d, b);
  }
  return {scale, hsum_i32(sum)};
}

PM_INLINE void store_probabilities(uint32_t* p, F32x16 x, Bf16Word) { store_bf16(reinterpret_cast<uint16_t*>(p), x); }
PM_INLINE void store_probabilities(uint32_t* p, F32x16 x, F32Word) { store(reinterpret_cast<float*>(p), x); }
PM_INLINE void store_probabilities(uint32_t* p, F32x16 x, I16Word) { store_i16(p, round_i32(x)); }

}  // namespace pm::PM_ISA
