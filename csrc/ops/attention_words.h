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
  using Sum = F16;
  using Probability = Word;
  static constexpr bool kBytes = false;
  static constexpr int kValueSteps = std::is_same<Word, F32Word>::value ? kGroup : kGroup / 2;
  PM_INLINE Sum first_sum(const int32_t*) { return zero(); }
  PM_INLINE W16 values(const uint32_t* p) { return load_words(p); }
  PM_INLINE F16 scores(Sum sum, const uint32_t*) { return sum; }
  PM_INLINE F16 outputs(Sum sum, float) { return sum; }
};

template <>
struct Kind<I8Word> {
  using Sum = I16;
  using Probability = I16Word;
  static constexpr bool kBytes = true;
  static constexpr int kValueSteps = kGroup / 2;
  PM_INLINE Sum first_sum(const int32_t* start) { return set1_i32(*start); }
  PM_INLINE W16 values(const uint32_t* p) { return load_byte_pairs(p); }
  // Scales of the group's 16 keys.
  PM_INLINE F16 scores(Sum sum, const uint32_t* scales) {
    return mul(to_float(sum), load_bf16(reinterpret_cast<const uint16_t*>(scales)));
  }
  PM_INLINE F16 outputs(Sum sum, float unit) { return mul(to_float(sum), set1(unit)); }
};

// The step of x [dim] in bytes: its largest magnitude / 127, never 0; NaN where x holds NaN or infinity.
PM_INLINE float byte_scale(const float* x, int dim) {
  F16 top = zero(), poison = zero();
  for (int d = 0; d < dim; d += 16) {
    const F16 v = load(x + d, tail_mask(dim - d));
    top = max(top, abs(v));
    poison = fma(v, zero(), poison);
  }
  const float scale = hmax(top) / kMaxByte + hsum(poison);
  return scale < 1e-30f ? 1e-30f : scale;
}

// x [dim] in steps of `scale` -> q, zeros up to the next multiple of 16; returns the sum of q.
PM_INLINE int32_t to_bytes(const float* x, int dim, float scale, int8_t* q) {
  const F16 inverse = set1(1.0f / scale);
  I16 sum = set1_i32(0);
  for (int d = 0; d < dim; d += 16) {
    const I16 v = round_i32(mul(load(x + d, tail_mask(dim - d)), inverse));
    sum = add(sum, v);
    store_i8(q + d, v);
  }
  return hsum_i32(sum);
}

PM_INLINE void store_probabilities(uint32_t* p, F16 x, Bf16Word) { store_bf16(reinterpret_cast<uint16_t*>(p), x); }
PM_INLINE void store_probabilities(uint32_t* p, F16 x, F32Word) { store(reinterpret_cast<float*>(p), x); }
PM_INLINE void store_probabilities(uint32_t* p, F16 x, I16Word) { store_i16(p, round_i32(x)); }

}  // namespace pm::PM_ISA
