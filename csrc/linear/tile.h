// The main loop of the ungrouped products: a tile of MR rows by NV vectors of columns, summed over all of K.
//
// The accumulators are separately named variables (the PM_ROW_ macros), not an array: GCC 12 copies and spills a
// two-dimensional array of vectors inside the loop, which halves the speed. `if constexpr` drops the unused names.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa/prefetch.h"
#include "isa/vec.h"

namespace pm::PM_ISA {

constexpr int kPanel = 32;                    // columns of a packed panel
constexpr int kStepBytes = 128;               // a panel's weights for one step along K

// Each step takes kActBytes of each row and 128 bytes of a panel, of which a tile takes two vectors: on AVX-512 that is
// the panel, so that weights come as one stream from memory (two streams side by side are slower by a fifth when rows are
// few). kRows is what fits the register file, 32 registers on AVX-512 and 16 elsewhere: two accumulators for each row,
// the weights and a broadcast.

struct StepF32 {  // one k
  using Acc = F32;
  using Weights = F32;
  static constexpr int kActBytes = 4;
  static constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 3;
  static Acc zero() { return zero_f32(); }
  static Weights weights(const std::byte* p) { return load(reinterpret_cast<const float*>(p)); }
  static F32 act(const std::byte* p) {
    float x;
    std::memcpy(&x, p, 4);
    return splat(x);
  }
  static Acc dot(Acc acc, Weights w, F32 a) { return fma(w, a, acc); }
  static F32 bits(Acc acc) { return acc; }
};

struct StepBf16 {  // two k, bfloat16 on both sides
  using Acc = F32;
  using Weights = I32;
  static constexpr int kActBytes = 4;
  static constexpr int kRows = StepF32::kRows;
  static Acc zero() { return zero_f32(); }
  static Weights weights(const std::byte* p) { return load_i32(p); }
  static I32 act(const std::byte* p) { return splat_word(p); }
  static Acc dot(Acc acc, Weights w, I32 a) { return dot_bf16(acc, w, a); }
  static F32 bits(Acc acc) { return acc; }
};

struct StepBf16Widened {  // two k, bfloat16 weights widened to float, float activations
  using Acc = F32;
  struct Weights {
    F32 even, odd;
  };
  struct Act {
    F32 even, odd;
  };
  static constexpr int kActBytes = 8;
  static constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 4 : 2;
  static Acc zero() { return zero_f32(); }
  static Weights weights(const std::byte* p) {
    const I32 both = load_i32(p);
    return {as_f32(shift_left<16>(both)), as_f32(and_(both, splat_i32(static_cast<int32_t>(0xFFFF0000u))))};
  }
  static Act act(const std::byte* p) { return {StepF32::act(p), StepF32::act(p + 4)}; }
  static Acc dot(Acc acc, const Weights& w, const Act& a) { return fma(w.odd, a.odd, fma(w.even, a.even, acc)); }
  static F32 bits(Acc acc) { return acc; }
};

struct StepInt8 {  // four k
  using Acc = I32;
  using Weights = I32;
  static constexpr int kActBytes = 4;
  static constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 2;
  static Acc zero() { return zero_i32(); }
  static Weights weights(const std::byte* p) { return load_i32(p); }
  static I32 act(const std::byte* p) { return splat_word(p); }
  static Acc dot(Acc acc, const Weights& w, I32 a) { return dot8(acc, w, a); }
  static F32 bits(Acc acc) { return as_f32(acc); }
};

// Where a tile takes a whole panel, its steps are few enough to carry another fetch.
constexpr bool kFetchesCache = kPanel == 2 * kLanes;

// What a rank reads afterwards, fetched into the second cache level while a tile is summed: with each step a piece of the
// panel after this one, and of the KV cache that the next attention will want.
struct Ahead {
  const std::byte* data;
  const uint16_t* scales;  // of the group kinds
  int64_t stride = kStepBytes;
  const std::byte* cache = data;  // KV
  int64_t cache_stride = 0;
};

#define PM_EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
// Twelve row addresses from four pointers and one stride, which is what x86 addressing can hold in registers.
#define PM_ROW_AT(r) ((r) < 3 ? a0 : (r) < 6 ? a3 : (r) < 9 ? a6 : a9) + ((r) % 3) * row_bytes
#define PM_ROW_DECLARE(r) [[maybe_unused]] auto c##r##_0 = S::zero(), c##r##_1 = S::zero();
#define PM_ROW_STEP(r)                      \
  if constexpr (MR > r) {                   \
    const auto a = S::act(PM_ROW_AT(r));    \
    c##r##_0 = S::dot(c##r##_0, w0, a);     \
    c##r##_1 = S::dot(c##r##_1, w1, a);     \
  }
#define PM_ROW_STORE(r)                                          \
  if constexpr (MR > r) {                                        \
    store(tile + r * kPanel, S::bits(c##r##_0));                 \
    store(tile + r * kPanel + kLanes, S::bits(c##r##_1));        \
  }

// Sums rows act[0 .. MR), `row_bytes` apart, against the two vectors of columns that begin at `w`, and leaves the raw sums
// (int32 as its bits) in tile[row * kPanel + column].
template <class S, int MR>
void sum_tile(const std::byte* act, int64_t row_bytes, const std::byte* w, int64_t steps, const Ahead& ahead, float* tile) {
  // From the second cache level into the first.
  constexpr int64_t kAhead = MR <= 6 ? 2048 : 1024;
  const std::byte *a0 = act, *a3 = act + 3 * row_bytes, *a6 = act + 6 * row_bytes, *a9 = act + 9 * row_bytes;
  const std::byte *next = ahead.data, *cache = ahead.cache;
  const int64_t next_stride = ahead.stride, cache_stride = ahead.cache_stride;
  PM_EACH_ROW(PM_ROW_DECLARE)
  for (int64_t step = 0; step < steps; ++step) {
    const auto w0 = S::weights(w);
    const auto w1 = S::weights(w + kLanes * 4);
    prefetch(w + kAhead);
    prefetch_second_level(next);
    if constexpr (kLanes == 16) {
      prefetch(w + kAhead + 64);
      prefetch_second_level(next + 64);
    }
    if constexpr (kFetchesCache) prefetch_second_level(cache);
    PM_EACH_ROW(PM_ROW_STEP)
    w += kStepBytes, next += next_stride, cache += cache_stride;
    a0 += S::kActBytes, a3 += S::kActBytes, a6 += S::kActBytes, a9 += S::kActBytes;
  }
  PM_EACH_ROW(PM_ROW_STORE)
}

#undef PM_ROW_DECLARE
#undef PM_ROW_STEP
#undef PM_ROW_STORE

}  // namespace pm::PM_ISA
