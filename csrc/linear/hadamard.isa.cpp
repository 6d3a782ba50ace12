// The fast Walsh-Hadamard transform of a row: log2(block) stages of butterflies, two stages a pass over the block, which
// lies in the first-level cache.
#include <cmath>

#include "isa/vec.h"
#include "linear/quantize.h"

namespace pm::PM_ISA {
namespace {

// The stages of distance 1 .. kLanes / 2 happen within a vector: v +- (v with lanes swapped at the distance).
inline F32 within(F32 v) {
  v = fma(v, lane_signs<1>(), swap_lanes<1>(v));
  v = fma(v, lane_signs<2>(), swap_lanes<2>(v));
  if constexpr (kLanes > 4) v = fma(v, lane_signs<4>(), swap_lanes<4>(v));
  if constexpr (kLanes > 8) v = fma(v, lane_signs<8>(), swap_lanes<8>(v));
  return v;
}

void small_block(float* v, int64_t block, float scale) {
  for (int64_t half = 1; half < block; half *= 2) {
    for (int64_t i = 0; i < block; ++i) {
      if ((i & half) != 0) continue;
      const float a = v[i], b = v[i + half];
      v[i] = a + b;
      v[i + half] = a - b;
    }
  }
  for (int64_t i = 0; i < block; ++i) v[i] *= scale;
}

void large_block(float* v, int64_t block, F32 scale) {
  for (int64_t i = 0; i < block; i += kLanes) store(v + i, within(load(v + i) * scale));
  int64_t half = kLanes;
  for (; half * 4 <= block; half *= 4) {  // distances half and 2 half
    for (int64_t i = 0; i < block; i += 4 * half) {
      for (int64_t j = i; j < i + half; j += kLanes) {
        const F32 a = load(v + j), b = load(v + j + half), c = load(v + j + 2 * half), d = load(v + j + 3 * half);
        const F32 ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
        store(v + j, ab + cd);
        store(v + j + half, a_b + c_d);
        store(v + j + 2 * half, ab - cd);
        store(v + j + 3 * half, a_b - c_d);
      }
    }
  }
  if (half < block) {  // one distance left: half the block
    for (int64_t j = 0; j < half; j += kLanes) {
      const F32 a = load(v + j), b = load(v + j + half);
      store(v + j, a + b);
      store(v + j + half, a - b);
    }
  }
}

}  // namespace

void hadamard_row(float* x, int64_t k, int64_t block) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(block));
  for (int64_t start = 0; start < k; start += block) {
    if (block < kLanes) {
      small_block(x + start, block, scale);
    } else {
      large_block(x + start, block, splat(scale));
    }
  }
}

}  // namespace pm::PM_ISA
